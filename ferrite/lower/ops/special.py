"""Transcendental and special functions, most of them one scalar operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.ir import arithmetic_type
from ferrite.lower.apply import compose
from ferrite.lower.builder import Builder
from ferrite.lower.formula import (
    Term,
    choose,
    elementwise,
    is_nan,
    larger,
    log,
    log1p,
    pointwise,
    result,
    term,
    working_type,
)
from ferrite.lower.promotion import Operand
from ferrite.lower.table import lowers
from ferrite.lower.value import Value
from ferrite.machines import host_machine

aten = torch.ops.aten

# By what they take: any number; no complex one; and none of 16 bits either.
ANY = "exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh sigmoid asin acos atan asinh acosh atanh"
REAL = "erf erfc erfinv lgamma digamma i0 special_i0e special_i1 special_i1e special_ndtr"
WIDE_ONLY = (
    "special_ndtri special_erfcx special_log_ndtr special_airy_ai special_bessel_j0 special_bessel_j1 "
    "special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 special_spherical_bessel_j0 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1"
)
POLYNOMIALS = (
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w"
)


def _floating(overload: Any, name: str, takes: str) -> None:
    """One scalar operator on floats, of all arguments in order."""

    @lowers(overload)
    def lower(ctx: Builder, **args: Operand) -> Value:
        return elementwise(ctx, name, *args.values(), floating=True, takes=takes)


for _takes, _names in {"any": ANY, "real": REAL, "wide": WIDE_ONLY}.items():
    for _name in _names.split():
        _floating(getattr(aten, _name).default, _name, _takes)
for _name in POLYNOMIALS.split():
    for _overload in ("default", "x_scalar", "n_scalar"):
        _floating(getattr(getattr(aten, _name), _overload), _name, "wide")
for _overload in ("default", "self_scalar", "other_scalar"):
    _floating(getattr(aten.special_zeta, _overload), "special_zeta", "wide")
_floating(aten.igamma.default, "igamma", "float")
_floating(aten.igammac.default, "igammac", "float")


@lowers(aten.polygamma.default)
def polygamma(ctx: Builder, n: int, x: Value) -> Value:
    dtype = arithmetic_type(working_type(ctx, x, floating=True, takes="real"))
    return result(ctx, term(ctx, n, torch.int64).call("polygamma", term(ctx, x, dtype), dtype=dtype))


@lowers(aten.special_entr.default)
def entr(ctx: Builder, x: Value) -> Value:
    def entropy(value: Term) -> Term:
        inside = choose(value > 0, -value * log(value), choose(value.equals(0), 0.0, value.like(-math.inf)))
        return choose(is_nan(value), value, inside)

    return pointwise(ctx, entropy, x, floating=True, takes="real")


def product_with(function: Callable[[Term], Term], ctx: Builder, x: Operand, other: Operand) -> Value:
    """x * f(y), where 0 times anything but NaN is 0; f(y) is rounded to 16 bits where x has them."""
    dtype = working_type(ctx, x, other, floating=True, takes="real")

    def made(value: Term, y: Term) -> Term:
        factor = function(y).to(dtype).to(y.dtype)
        return choose(is_nan(y), y, choose(value.equals(0), 0.0, value * factor))

    return pointwise(ctx, made, x, other, floating=True)


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(ctx: Builder, x: Operand, other: Operand) -> Value:
    return product_with(log, ctx, x, other)


@lowers(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)
def xlog1py(ctx: Builder, x: Operand, other: Operand) -> Value:
    return product_with(log1p, ctx, x, other)


def added_powers(ctx: Builder, x: Value, other: Value, power: str, unit: float) -> Value:
    """The larger operand, and the logarithm of what the smaller adds; equal infinities stay as they are."""

    def added(a: Term, b: Term) -> Term:
        whole = larger(a, b) + log1p((-abs(a - b)).call(power)) * unit
        return choose(a.call("isinf", dtype=torch.bool) & a.equals(b), a, whole)

    return pointwise(ctx, added, x, other, takes="float")


@lowers(aten.logaddexp.default)
def logaddexp(ctx: Builder, x: Value, other: Value) -> Any:
    if ctx.out_dtype.is_complex:
        return compose(ctx, aten.logaddexp.default, (x, other), {}, ctx.out)
    return added_powers(ctx, x, other, "exp", 1.0)


@lowers(aten.logaddexp2.default)
def logaddexp2(ctx: Builder, x: Value, other: Value) -> Any:
    if ctx.out_dtype.is_complex:
        return compose(ctx, aten.logaddexp2.default, (x, other), {}, ctx.out)
    return added_powers(ctx, x, other, "exp2", 1 / math.log(2))


@lowers(aten.logit.default)
def logit(ctx: Builder, x: Value, eps: float | None) -> Value:
    def odds(value: Term, *edge: Term) -> Term:
        if edge:
            value = choose(value < edge[0], edge[0], choose(value > 1 - edge[0], 1 - edge[0], value))
        return log(value / (1 - value))

    return pointwise(ctx, odds, x, floating=True, takes="real", numbers=() if eps is None else [eps])


@lowers(aten.sinc.default)
def sinc(ctx: Builder, x: Value) -> Value:
    def wave(value: Term) -> Term:
        angle = value * math.pi
        return choose(value.equals(0), 1.0, angle.call("sin") / angle)

    return pointwise(ctx, wave, x, floating=True)


@lowers(aten.deg2rad.default)
def deg2rad(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda value: value * (math.pi / 180), x, floating=True)


@lowers(aten.rad2deg.default)
def rad2deg(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda value: value * (180 / math.pi), x, floating=True)


@lowers(aten.mvlgamma.default)
def mvlgamma(ctx: Builder, x: Value, p: int) -> Value:
    def logarithm(value: Term) -> Term:
        total = value.like(p * (p - 1) * 0.25 * math.log(math.pi))
        for step in range(p):
            total = total + (value - step / 2).call("lgamma")
        return total

    return pointwise(ctx, logarithm, x, floating=True, takes="number")


@lowers(aten.relu.default)
def relu(ctx: Builder, x: Value) -> Value:
    """Of a negative zero: eager's scalar code keeps it, and its vector code on some processors."""
    if x.device.type == "cpu" and host_machine().relu_keeps_negative_zero:
        return pointwise(ctx, lambda value: choose(value < 0, 0, value), x, takes="number")
    return pointwise(ctx, lambda value: larger(value, 0), x, takes="number")
