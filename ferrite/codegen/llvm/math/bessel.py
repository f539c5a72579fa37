"""Modified Bessel functions of the first kind.

Up to 8 a series, beyond exp(x) / sqrt(x) times a polynomial of 1 / x. f32 computes in f64.
"""

from __future__ import annotations

from collections.abc import Mapping

from ferrite.codegen.coefficients.special import I0_LARGE, I0_SMALL, I1_LARGE, I1_SMALL
from ferrite.codegen.llvm.math.exp import exp_in_parts, exp_of_negative
from ferrite.codegen.llvm.math.function import Body, MathFunction
from ferrite.codegen.llvm.math.text import Value, copysign, fabs, minimum, polynomial, select, sqrt

LIMIT = 8.0
OVERFLOW = 720.0  # beyond, the functions are infinite in f64


def small_i0(a: Value) -> Value:
    return polynomial(a * a * 0.25, I0_SMALL["double"])


def small_i1(a: Value) -> Value:
    return a * 0.5 * polynomial(a * a * 0.25, I1_SMALL["double"])


def scaled_large(a: Value, table: Mapping[str, tuple[float, ...]]) -> Value:
    """The function times exp(-a)."""
    return polynomial(2.0 * LIMIT / a - 1.0, table["double"]) / sqrt(a)


def times_exp(scaled: Value, a: Value) -> Value:
    """In an order in which nothing overflows before the result does."""
    near_one, first, second = exp_in_parts(a)
    return scaled * near_one * first * second


def i0(x: Value) -> Value:
    a = minimum(fabs(x), OVERFLOW)
    return select(a < LIMIT, small_i0(a), times_exp(scaled_large(a, I0_LARGE), a))


def i1(x: Value) -> Value:
    a = minimum(fabs(x), OVERFLOW)
    return copysign(select(a < LIMIT, small_i1(a), times_exp(scaled_large(a, I1_LARGE), a)), x)


def i0e(x: Value) -> Value:
    a = fabs(x)
    return select(a < LIMIT, small_i0(a) * exp_of_negative(-a), scaled_large(a, I0_LARGE))


def i1e(x: Value) -> Value:
    a = fabs(x)
    return copysign(select(a < LIMIT, small_i1(a) * exp_of_negative(-a), scaled_large(a, I1_LARGE)), x)


def _function(name: str, body: Body) -> MathFunction:
    return MathFunction(
        name, body, 0.51, 5.0, wide=True, inline=False, method="series up to 8, beyond by exp; f32 in f64"
    )


FUNCTIONS = (
    _function("i0", i0),
    _function("special_i0e", i0e),
    _function("special_i1", i1),
    _function("special_i1e", i1e),
    _function("special_modified_bessel_i0", i0),
    _function("special_modified_bessel_i1", i1),
)
