"""Elementwise arithmetic and rounding, with torch's promotion and broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import NARROW, PART_TYPES, Expr, Index, arithmetic_type, is_integer
from ferrite.lower.builder import Builder
from ferrite.lower.formula import (
    Term,
    check_fits,
    choose,
    elementwise,
    first_device,
    is_nan,
    is_number,
    larger,
    pointwise,
    result,
    smaller,
    term,
    working_type,
)
from ferrite.lower.promotion import Operand
from ferrite.lower.table import lowers
from ferrite.lower.value import Value

aten = torch.ops.aten


# --- one operand ------------------------------------------------------------------------------------------------------


def _unary(packet: Any, name: str) -> None:
    @lowers(packet.default)
    def lower(ctx: Builder, x: Value) -> Value:
        return elementwise(ctx, name, x, floating=name != "neg")


for _name in ["neg", "sqrt", "rsqrt", "reciprocal"]:
    _unary(getattr(aten, _name), _name)


@lowers(aten.abs.default)
def abs_(ctx: Builder, x: Value) -> Value:
    if x.dtype.is_complex:
        return pointwise(ctx, modulus, x)
    return elementwise(ctx, "abs", x, takes="number")


def modulus(z: Term) -> Term:
    return z.call("abs_complex", dtype=real_type(z.dtype))


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the parts of a complex number."""
    return PART_TYPES.get(dtype, dtype)


def same(ctx: Builder, x: Value) -> Value:
    """A copy."""
    return result(ctx, term(ctx, x, x.dtype))


@lowers(aten.sign.default)
def sign(ctx: Builder, x: Value) -> Value:
    return same(ctx, x) if x.dtype is torch.bool else elementwise(ctx, "sign", x, takes="real")


@lowers(aten.sgn.default)
def sgn(ctx: Builder, x: Value) -> Value:
    if not x.dtype.is_complex:
        return sign(ctx, x)

    def direction(z: Term) -> Term:
        length = modulus(z)
        return choose(length.equals(0), 0, z / length.to(z.dtype))

    return pointwise(ctx, direction, x)


def _rounding(name: str) -> Callable[[Builder, Value], Value]:
    @lowers(getattr(aten, name).default)
    def lower(ctx: Builder, x: Value) -> Value:
        working_type(ctx, x, takes="number")
        return same(ctx, x) if is_integer(x.dtype) else elementwise(ctx, name, x)

    return lower


for _name in ["ceil", "floor", "trunc"]:
    _rounding(_name)
round_ = _rounding("round")


@lowers(aten.round.decimals)
def round_decimals(ctx: Builder, x: Value, decimals: int) -> Value:
    def nearest(value: Term) -> Term:
        tens = 10.0 ** abs(decimals)
        return (value / tens).call("round") * tens if decimals < 0 else (value * tens).call("round") / tens

    if decimals == 0:
        return round_(ctx, x)
    return pointwise(ctx, nearest, x, takes="float")


@lowers(aten.frac.default)
def frac(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda value: value - value.call("trunc"), x, takes="float")


@lowers(aten.square.default)
def square(ctx: Builder, x: Value) -> Value:
    return elementwise(ctx, "logical_and", x, x) if x.dtype is torch.bool else pointwise(ctx, lambda v: v * v, x)


@lowers(aten.frexp.Tensor)
def frexp(ctx: Builder, x: Value) -> tuple[Value, Value]:
    value = term(ctx, x, arithmetic_type(x.dtype))
    exponent = value.call("frexp_exponent", dtype=torch.int32)
    return result(ctx, value.call("frexp_mantissa")), ctx.lazy(x.sizes, exponent.expr, x.device)


@lowers(aten.nan_to_num.default)
def nan_to_num(ctx: Builder, x: Value, nan: Any, posinf: Any, neginf: Any) -> Value:
    if is_integer(x.dtype):
        return same(ctx, x)
    if x.dtype.is_complex:
        wide = arithmetic_type(x.dtype)
        parts = [term(ctx, x, wide).call(part, dtype=real_type(wide)) for part in ("real", "imag")]
        real, imag = (finite(ctx, part, real_type(x.dtype), nan, posinf, neginf) for part in parts)
        return result(ctx, real.call("complex", imag, dtype=wide))
    return result(ctx, finite(ctx, term(ctx, x, arithmetic_type(x.dtype)), x.dtype, nan, posinf, neginf))


def finite(ctx: Builder, value: Term, dtype: torch.dtype, nan: Any, posinf: Any, neginf: Any) -> Term:
    """Numbers for what is none: in 16 bits, what rounds to infinity is replaced by what it is given, as it is."""
    most = torch.finfo(dtype).max

    def number(given: Any, default: float) -> Term:
        return term(ctx, default if given is None else given, value.dtype)

    value_or = choose(value.equals(-math.inf), number(neginf, -most), value)
    value_or = choose(value.equals(math.inf), number(posinf, most), value_or)
    return choose(is_nan(value), number(nan, 0.0), value_or)


# --- two operands -----------------------------------------------------------------------------------------------------


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(ctx: Builder, x: Operand, other: Operand, alpha: Any) -> Value:
    return summed(ctx, "add", x, other, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: Builder, x: Operand, other: Operand, alpha: Any) -> Value:
    return summed(ctx, "sub", x, other, alpha)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Builder, x: Operand, other: Operand, alpha: Any) -> Value:
    return summed(ctx, "sub", other, x, alpha)


def summed(ctx: Builder, name: str, x: Operand, other: Operand, alpha: Any) -> Value:
    """x + alpha * other, in one rounding; for truth values, or. On the CPU, numbers are rounded to 16 bits first."""
    dtype = working_type(ctx, x, other)
    if name == "sub" and any(is_truth(item) for item in (x, other)):
        raise NotLowered("subtraction of truth values, which eager refuses")
    once = not isinstance(alpha, (Expr, Index)) and alpha == 1
    if dtype is torch.bool:
        return elementwise(ctx, "logical_or", x, other if once or alpha else x)
    exact = first_device(ctx).type != "cpu"
    if once:
        return elementwise(ctx, name, x, other, exact=exact)

    def scaled(left: Term, right: Term, factor: Term) -> Term:
        if dtype in (torch.float32, torch.float64):
            return right.call("fma", factor if name == "add" else -factor, left)
        return left.call(name, right * factor)

    return pointwise(ctx, scaled, x, other, exact=exact, numbers=[alpha])


def is_truth(operand: Operand) -> bool:
    return operand.dtype is torch.bool if isinstance(operand, Value) else isinstance(operand, bool)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: Builder, x: Operand, other: Operand) -> Value:
    return elementwise(ctx, "logical_and" if working_type(ctx, x, other) is torch.bool else "mul", x, other, exact=True)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def div(ctx: Builder, x: Operand, other: Operand) -> Value:
    return elementwise(ctx, "div", x, other, floating=True, exact=True)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Builder, x: Operand, other: Operand, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return div(ctx, x, other)
    return floor_divide(ctx, x, other) if rounding_mode == "floor" else trunc_divide(ctx, x, other)


def trunc_divide(ctx: Builder, x: Operand, other: Operand) -> Value:
    """By a tensor of 16-bit floats: the quotient is rounded to them before its fraction is dropped."""
    dtype = working_type(ctx, x, other, takes="number")
    if dtype not in NARROW or is_number(other):
        return elementwise(ctx, "trunc_divide", x, other, exact=True)
    return pointwise(ctx, lambda top, bottom: (top / bottom).to(dtype).to(top.dtype).call("trunc"), x, other)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Builder, x: Operand, other: Operand) -> Value:
    return elementwise(ctx, "floor_divide", x, other, takes="number", exact=True)


def _binary(name: str, overloads: str, takes: str) -> None:
    for overload in overloads.split():

        @lowers(getattr(getattr(aten, name), overload))
        def lower(ctx: Builder, x: Operand, other: Operand) -> Value:
            return elementwise(ctx, name, x, other, floating=name in ("atan2", "copysign"), takes=takes)


for _row in (
    ("maximum", "default", "real"),
    ("minimum", "default", "real"),
    ("fmax", "default", "real"),
    ("fmin", "default", "real"),
    ("atan2", "default", "real"),
    ("hypot", "default", "float"),
    ("copysign", "Tensor Scalar", "real"),
    ("gcd", "default", "whole"),
    ("lcm", "default", "whole"),
    ("remainder", "Tensor Scalar Scalar_Tensor", "number"),
    ("fmod", "Tensor Scalar", "number"),
):
    _binary(*_row)


@lowers(aten.nextafter.default)
def nextafter(ctx: Builder, x: Value, other: Value) -> Value:
    common = working_type(ctx, x, other, takes="float")
    if common not in NARROW:
        return elementwise(ctx, "nextafter", x, other)
    return result(ctx, next_narrow(term(ctx, x, common), term(ctx, other, common)))


def next_narrow(start: Term, end: Term) -> Term:
    """The next number of 16 bits: its bits, as an integer, one more when moving away from zero, one less towards it."""
    wide, goal = start.to(torch.float32), end.to(torch.float32)
    bits = start.call("bitcast", dtype=torch.int16)
    away = (wide < goal).call("eq", wide > 0, dtype=torch.bool)
    moved = choose(away, bits + 1, bits - 1)
    tiny = choose(goal > 0, bits.like(1), bits.like(-0x7FFF))  # from zero, to the smallest number on either side
    new = choose(wide.equals(0), tiny, moved).call("bitcast", dtype=start.dtype)
    new = choose(wide.equals(goal), end, new)
    either = (wide + goal).to(start.dtype)
    return choose(is_nan(wide) | is_nan(goal), either, new)


@lowers(aten.ldexp.Tensor)
def ldexp(ctx: Builder, x: Value, other: Value) -> Value:
    """x * 2**other, the power rounded to the type torch gives it."""
    power = power_type(other)
    dtype = working_type(ctx, x, other, floating=True)
    two = term(ctx, other, arithmetic_type(power)).call("exp2").to(power)
    return result(ctx, term(ctx, x, arithmetic_type(dtype)) * two.to(arithmetic_type(dtype)))


def power_type(exponent: Value) -> torch.dtype:
    return torch.get_default_dtype() if is_integer(exponent.dtype) else exponent.dtype


@lowers(aten.heaviside.default)
def heaviside(ctx: Builder, x: Value, values: Value) -> Value:
    def step(value: Term, at_zero: Term) -> Term:
        above = value > 0
        return choose(value.equals(0), at_zero, above if value.dtype is torch.bool else above.to(value.dtype))

    return pointwise(ctx, step, x, values, takes="real")


# --- three operands ---------------------------------------------------------------------------------------------------


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Builder, x: Value, min: Any, max: Any) -> Value:
    """NaN in any operand wins; where the bounds cross, the upper one counts."""
    bounds = [bound for bound in (min, max) if bound is not None]
    check_bounds(ctx, x, *bounds)

    def inside(value: Term, *given: Term) -> Term:
        left = list(given)
        if min is not None:
            value = larger(value, left.pop(0))
        return smaller(value, left.pop(0)) if max is not None else value

    return pointwise(ctx, inside, x, *bounds)


def check_bounds(ctx: Builder, x: Value, *bounds: Any) -> None:
    tensors = len(bounds) == 1 and isinstance(bounds[0], Value)  # then it is the same as `maximum`
    dtype = working_type(ctx, x, *bounds, takes="real" if tensors else "number")
    for bound in bounds:
        check_fits(bound, dtype)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Builder, x: Value, min: Any) -> Value:
    check_bounds(ctx, x, min)
    return pointwise(ctx, larger, x, min)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Builder, x: Value, max: Any) -> Value:
    check_bounds(ctx, x, max)
    return pointwise(ctx, smaller, x, max)


@lowers(aten.addcmul.default)
def addcmul(ctx: Builder, x: Value, tensor1: Value, tensor2: Value, value: Any) -> Value:
    working_type(ctx, x, tensor1, tensor2, takes="any" if ctx.out_dtype is not torch.bool else "number")
    made = lambda start, a, b, factor: plus_product(start, factor * a, b)  # noqa: E731
    return pointwise(ctx, made, x, tensor1, tensor2, numbers=[value])


def plus_product(start: Term, a: Term, b: Term) -> Term:
    """start + a * b, in one rounding where these are real: so torch's compiler has made it of eager's kernels."""
    return a.call("fma", b, start) if start.dtype.is_floating_point else start + a * b


@lowers(aten.addcdiv.default)
def addcdiv(ctx: Builder, x: Value, tensor1: Value, tensor2: Value, value: Any) -> Value:
    made = lambda start, a, b, factor: start + factor * a / b  # noqa: E731
    return pointwise(ctx, made, x, tensor1, tensor2, takes="complex or float", numbers=[value])


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Builder, x: Value, end: Value, weight: Any) -> Value:
    """From the nearer end, so that both ends are met exactly."""

    def between(start: Term, goal: Term, share: Term) -> Term:
        size = modulus(share) if share.dtype.is_complex else abs(share)
        way = goal - start
        return choose(size < 0.5, plus_product(start, share, way), plus_product(goal, -way, 1 - share))

    dtype = working_type(ctx, x, end, takes="complex or float")
    return result(ctx, between(*(term(ctx, arg, arithmetic_type(dtype)) for arg in (x, end, weight))))
