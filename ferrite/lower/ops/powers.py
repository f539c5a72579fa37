"""Powers: small whole exponents are products, halves are roots, everything else is the scalar operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import NARROW, arithmetic_type, is_integer, short
from ferrite.lower.builder import Builder
from ferrite.lower.formula import Term, check_fits, elementwise, first_device, result, sqrt, term, working_type
from ferrite.lower.promotion import Operand
from ferrite.lower.table import lowers
from ferrite.lower.value import Value

aten = torch.ops.aten

# Every product rounds: this many leave a float as near to the power as a library's function does. In 16 bits, where
# the products have 32, more do.
MAX_FACTORS = 4
MAX_FACTORS_NARROW = 31


@lowers(aten.pow.Tensor_Scalar)
def power_of_tensor(ctx: Builder, x: Value, exponent: Any) -> Value:
    dtype = power_type(ctx, x, exponent)
    if isinstance(exponent, (bool, int, float)):
        if is_integer(dtype) and exponent < 0:
            raise NotLowered("a negative power of integers, which eager refuses")
        formula = known_power(dtype, exponent, first_device(ctx))
        if formula is not None:
            return result(ctx, formula(term(ctx, x, dtype).to(arithmetic_type(dtype))))
    return elementwise(ctx, "pow", x, exponent)


def power_type(ctx: Builder, base: Operand, exponent: Operand) -> torch.dtype:
    dtype = working_type(ctx, base, exponent)
    if dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise NotLowered(f"powers of {short(dtype)}, which eager refuses")
    for number in (base, exponent):
        check_fits(number, dtype)
    return dtype


def known_power(dtype: torch.dtype, exponent: float, device: torch.device) -> Callable[[Term], Term] | None:
    """A function that raises a term to a known power, where that is simpler than the general one."""
    if abs(exponent) < 2**31 and exponent == int(exponent):
        times = int(exponent)
        most = MAX_FACTORS_NARROW if dtype in NARROW else MAX_FACTORS
        if times >= 0 and (is_integer(dtype) or times <= most):
            return lambda value: repeated(value, times)
        if times in (-1, -2) and not is_integer(dtype):
            return lambda value: repeated(value, -times).call("reciprocal")
    if dtype is torch.float16 and device.type == "cpu":  # there eager has no roots: -inf to the power 0.5 is inf
        return None
    if exponent == 0.5 and dtype.is_floating_point:
        return sqrt
    if exponent == -0.5 and dtype.is_floating_point:
        return lambda value: value.call("rsqrt")
    return None


def repeated(value: Term, times: int) -> Term:
    """A whole power by squaring; the power 0 is 1 even of NaN."""
    total: Term | None = None
    while times:
        if times & 1:
            total = value if total is None else total * value
        times >>= 1
        value = value * value if times else value
    return value.like(1) if total is None else total


@lowers(aten.pow.Tensor_Tensor)
def power(ctx: Builder, x: Value, exponent: Value) -> Value:
    power_type(ctx, x, exponent)
    return elementwise(ctx, "pow", x, exponent)


@lowers(aten.pow.Scalar)
def power_of_number(ctx: Builder, x: Any, exponent: Value) -> Value:
    dtype = power_type(ctx, x, exponent)
    wide = arithmetic_type(dtype)
    if isinstance(x, (int, float)) and not isinstance(x, bool) and x == 2 and dtype.is_floating_point:
        return result(ctx, term(ctx, exponent, wide).call("exp2"))
    if isinstance(x, (bool, int, float)) and x == 1:
        return result(ctx, term(ctx, exponent, wide).like(1))
    return elementwise(ctx, "pow", x, exponent)
