"""Hyperbolic functions and their inverses."""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import LN2
from ferrite.codegen.coefficients.elementary import SINH, TANH
from ferrite.codegen.llvm.math.exp import OVERFLOW, exp_in_parts, exp_of_moderate
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.log import log1p
from ferrite.codegen.llvm.math.text import NAN, Value, copysign, fabs, fma, minimum, polynomial, select, sqrt

TANH_IS_ONE = {"float": 9.02, "double": 19.1}
HUGE = 2.0**54  # a number beside which one is nothing


def half_of_exp(a: Value) -> Value:
    """exp(a) / 2 of what is positive, also where exp(a) would overflow."""
    near_one, first, second = exp_in_parts(minimum(a, OVERFLOW[a.element] + 1.0))
    return near_one * first * (second * 0.5)


def sinh(x: Value) -> Value:
    a = fabs(x)
    z = a * a
    small = fma(a * z, polynomial(z, SINH[x.element]), a)
    half = half_of_exp(a)
    return copysign(select(a < 1.0, small, half - 0.25 / half), x)


def cosh(x: Value) -> Value:
    half = half_of_exp(fabs(x))
    return half + 0.25 / half


def tanh(x: Value) -> Value:
    a = minimum(fabs(x), TANH_IS_ONE[x.element])
    z = a * a
    small = fma(a * z, polynomial(z, TANH[x.element]), a)
    large = 1.0 - 2.0 / (exp_of_moderate(a + a) + 1.0)
    return copysign(select(a < 0.625, small, large), x)


def log_of_double(huge: Value, a: Value, otherwise: Value) -> Value:
    """log(2 a) where a is huge, else log1p of the other value."""
    return log1p(select(huge, a, otherwise)) + select(huge, a.like(LN2[a.element][0]), 0.0)


def asinh(x: Value) -> Value:
    a = fabs(x)
    z = a * a
    return copysign(log_of_double(a > HUGE, a, a + z / (1.0 + sqrt(z + 1.0))), x)


def acosh(x: Value) -> Value:
    above = x - 1.0
    result = log_of_double(x > HUGE, x, above + sqrt(above * (above + 2.0)))
    return select(x < 1.0, NAN, result)


def atanh(x: Value) -> Value:
    a = fabs(x)
    return copysign(0.5 * log1p((a + a) / (1.0 - a)), x)


FUNCTIONS = (
    MathFunction("sinh", sinh, f32=2.0, f64=2.0, method="a polynomial; beyond 1 by exp and one division"),
    MathFunction("cosh", cosh, f32=2.0, f64=2.0, method="exp and one division"),
    MathFunction("tanh", tanh, f32=1.5, f64=1.5, method="a polynomial; beyond 0.625 by exp and one division"),
    MathFunction("asinh", asinh, f32=0.51, f64=3.0, wide=True, method="log1p; f32 in f64"),
    MathFunction("acosh", acosh, f32=0.51, f64=3.0, wide=True, method="log1p; f32 in f64"),
    MathFunction("atanh", atanh, f32=0.51, f64=3.0, wide=True, method="log1p; f32 in f64"),
)
