"""The logarithm of the gamma function, and its derivative.

From 3 on both are Stirling's formula with a polynomial of 1 / x^2 that is exact enough there. Below, quotients of
polynomials hold their roots as factors; negative arguments go through the reflection at zero. f32 computes in f64.
"""

from __future__ import annotations

import math

from ferrite.codegen.coefficients.constants import DIGAMMA_ZERO, PI
from ferrite.codegen.coefficients.special import DIGAMMA_LARGE, DIGAMMA_ROOT, LGAMMA_1, LGAMMA_2, LGAMMA_LARGE
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.log import log
from ferrite.codegen.llvm.math.power import log_in_parts
from ferrite.codegen.llvm.math.text import (
    INFINITY,
    NAN,
    Value,
    copysign,
    fabs,
    fma,
    nearest,
    polynomial,
    quotient,
    select,
)
from ferrite.codegen.llvm.math.trig import quarter_turns, sine_of_turned

STIRLING = (math.log(2 * math.pi) - 1) / 2


def sine_and_cosine_of_turns(a: Value) -> tuple[Value, Value]:
    """sin(pi a) and cos(pi a), up to a common sign."""
    angle = (a - nearest(a)) * PI["double"][0]
    sign_free = fabs(angle)
    sine = copysign(sine_of_turned(*quarter_turns(sign_free, 0)), angle)
    return sine, sine_of_turned(*quarter_turns(sign_free, 1))


def lgamma_from_half(y: Value) -> Value:
    """Where y is one half or more."""
    log_y, log_low = log_in_parts(y)
    inverse = 1.0 / y
    below, above = y - 0.5, log_y - 1.0
    rest = fma(inverse, polynomial(inverse * inverse, LGAMMA_LARGE["double"]), below * log_low)
    large = fma(below, above, rest + STIRLING)
    near_one = fma(y - 1.0, quotient(y - 1.0, LGAMMA_1["double"]), 0.0)  # zero at one is positive
    near_two = (y - 2.0) * quotient(y - 2.0, LGAMMA_2["double"])
    return select(y < 1.5, near_one, select(y < 3.0, near_two, large))


def lgamma(x: Value) -> Value:
    a = fabs(x)
    tiny = a < 0.5
    ordinary = lgamma_from_half(select(tiny, 1.0, a))
    near_zero = x * quotient(x, LGAMMA_1["double"]) - log(a)
    sine, _ = sine_and_cosine_of_turns(a)
    reflected = log(PI["double"][0] / (a * fabs(sine))) - ordinary
    result = select(tiny, near_zero, select(x < 0.0, reflected, ordinary))
    return select(a.equals(INFINITY), INFINITY, result)


def digamma_from_one(y: Value) -> Value:
    """Where y is one or more."""
    middle = (y >= 2.0) & (y < 3.0)
    near = select(middle, y - 1.0, y)
    root, root_low, _ = DIGAMMA_ZERO["double"]
    small = ((near - root) - root_low) * quotient(near - 1.0, DIGAMMA_ROOT["double"])
    small = select(middle, small + 1.0 / (y - 1.0), small)
    inverse = 1.0 / y
    square = inverse * inverse
    large = log(y) - fma(square, polynomial(square, DIGAMMA_LARGE["double"]), inverse * 0.5)
    return select(y < 3.0, small, large)


def digamma(x: Value) -> Value:
    a = fabs(x)
    raised = (x < 1.0) & (x > -INFINITY)
    # digamma(x) is digamma(x + 1) - 1 / x, and that of 1 - x less pi / tan(pi x)
    result = digamma_from_one(select(raised, a + 1.0, a))
    sine, cosine = sine_and_cosine_of_turns(a)
    other = select(x < 0.0, PI["double"][0] * cosine / sine, -1.0 / a)
    result = select(raised, result + other, result)
    is_pole = (x < 0.0) & nearest(x).equals(x)
    return select(x.equals(0.0), copysign(INFINITY, -x), select(is_pole, NAN, result))


METHOD = "Stirling's formula; quotients of polynomials; reflection; f32 in f64"
FUNCTIONS = (
    MathFunction("lgamma", lgamma, 0.51, 6.0, wide=True, inline=False, floor=1.0, method=METHOD),
    MathFunction("digamma", digamma, 0.51, 8.0, wide=True, inline=False, floor=1.0, method=METHOD),
)
