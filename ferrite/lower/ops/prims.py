"""The primitive operators that torch's decompositions end in: no promotion, no broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.ir import cast, is_integer
from ferrite.lower import formula
from ferrite.lower.builder import Builder
from ferrite.lower.formula import compared, elementwise
from ferrite.lower.ops import comparisons, pointwise
from ferrite.lower.table import lowers, lowers_later
from ferrite.lower.value import Value

prims: Any = torch.ops.prims

SAME_NAME = (
    "acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_or bitwise_xor cos cosh digamma erf erfc exp exp2 "
    "expm1 fmax fmin fmod gcd hypot igamma igammac lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal "
    "remainder rsqrt sin sinh sqrt sub tan tanh"
)
OTHER_NAME = {
    "bessel_i0": "i0",
    "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1",
    "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0",
    "bessel_j1": "special_bessel_j1",
    "erf_inv": "erfinv",
    "erfcx": "special_erfcx",
    "ndtri": "special_ndtri",
    "shift_left": "bitwise_left_shift",
    "shift_right_arithmetic": "bitwise_right_shift",
    "spherical_bessel_j0": "special_spherical_bessel_j0",
    "zeta": "special_zeta",
}


def _same(packet: Any, name: str) -> None:
    @lowers(packet.default)
    def lower(ctx: Builder, **args: Value) -> Value:
        if ctx.out_dtype is torch.bool and name in ("add", "mul"):
            return elementwise(ctx, "logical_or" if name == "add" else "logical_and", *args.values())
        return elementwise(ctx, name, *args.values())


for _name in SAME_NAME.split():
    _same(getattr(prims, _name), _name)
for _name, _other in OTHER_NAME.items():
    if hasattr(prims, _name):
        _same(getattr(prims, _name), _other)


def _comparison(name: str) -> None:
    @lowers(getattr(prims, name).default)
    def lower(ctx: Builder, x: Value, other: Value) -> Value:
        return compared(ctx, name, x, other)


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _comparison(_name)

# What torch calls by the same name elsewhere is the same.
SAME_FUNCTION: dict[str, Callable[..., Any]] = {
    "abs": pointwise.abs_,
    "sign": pointwise.sign,
    "frexp": pointwise.frexp,
    "nextafter": pointwise.nextafter,
    "bitwise_not": comparisons.bitwise_not,
    "isfinite": comparisons.isfinite,
    "signbit": comparisons.signbit,
}
for _name, _function in SAME_FUNCTION.items():
    lowers(getattr(prims, _name).default)(_function)


def _rounding(name: str) -> None:
    @lowers(getattr(prims, name).default)
    def lower(ctx: Builder, x: Value) -> Value:
        return pointwise.same(ctx, x) if is_integer(x.dtype) else elementwise(ctx, name, x)


for _name in ["ceil", "floor", "trunc", "round"]:
    _rounding(_name)


@lowers(prims.div.default)
def div(ctx: Builder, x: Value, other: Value) -> Value:
    """Of integers: towards zero."""
    return elementwise(ctx, "trunc_divide" if is_integer(x.dtype) else "div", x, other)


@lowers_later("prims.fma.default")
def fma(ctx: Builder, a: Value, b: Value, c: Value) -> Value:
    """What Dynamo makes of `addcmul_` and the like whose factor is a tensor: in eager, a number that is not rounded."""
    return formula.pointwise(ctx, lambda x, y, z: pointwise.plus_product(z, x, y), a, b, c, exact=True)


@lowers(prims.where.default)
def where(ctx: Builder, pred: Value, a: Value, b: Value) -> Value:
    return comparisons.where(ctx, pred, a, b)


@lowers(prims.convert_element_type.default)
def convert_element_type(ctx: Builder, a: Value, dtype: torch.dtype) -> Value:
    return ctx.lazy(a.sizes, cast(ctx.elements(a, a.sizes), dtype), a.device)


@lowers(prims.clone.default)
def clone(ctx: Builder, x: Value, memory_format: object) -> Value:
    return pointwise.same(ctx, x)


@lowers(prims.maximum_value.default, prims.minimum_value.default)
def known_number(ctx: Builder, dtype: torch.dtype) -> Any:
    """Torch has worked it out already."""
    return ctx.out
