"""Inverses of the error function, its scaled complement, and the normal distribution.

f32 computes in f64, but for the distribution itself: gelu is made of it.
"""

from __future__ import annotations

import math

from ferrite.codegen.coefficients.constants import LOG2_OF_E, in_parts
from ferrite.codegen.coefficients.special import (
    ERFCINV_1,
    ERFCINV_2,
    ERFCINV_3,
    ERFINV,
    NORMAL_EXP,
    NORMAL_TAIL,
)
from ferrite.codegen.llvm.math.error_function import ERFC_IS_ZERO, scaled_erfc
from ferrite.codegen.llvm.math.exp import exp_in_parts, power_of_two, shifter
from ferrite.codegen.llvm.math.function import Body, MathFunction
from ferrite.codegen.llvm.math.log import log, log1p
from ferrite.codegen.llvm.math.text import (
    EXPONENT_BIAS,
    INFINITY,
    NAN,
    Value,
    copysign,
    fabs,
    fma,
    minimum,
    polynomial,
    polynomial_in_halves,
    quotient,
    select,
    sqrt,
)

ROOT_OF_2 = in_parts("1.4142135623730950488016887242096980785696718753769480731766797")
ROOT_OF_HALF = in_parts("0.70710678118654752440084436210484903928483593768847403658833987")
SHORT_LN2 = (45426 / 2**16, math.log(2) - 45426 / 2**16)  # the first has 16 bits
NORMAL_IS_ZERO = {"float": 14.25, "double": 38.6}
SCALE = 64
# Both times 3/4, too: floats are coarsest just above a power of two, which is where the parts begin.
SCALED_TAIL = (
    [0.75 * 2.0**-SCALE * value for value in NORMAL_TAIL["float"][0]],
    [0.75 * value for value in NORMAL_TAIL["float"][1]],
)
ONE_OVER_ROOT_PI = 1 / math.sqrt(math.pi)
# sqrt(pi) x exp(x^2) erfc(x), over 1 / x^2: one term more than doubles need from 27 on
ASYMPTOTIC = (1.0, -0.5, 0.75, -1.875, 6.5625, -29.53125, 162.421875, -1055.7421875)


def erfinv_of_small(x: Value) -> Value:
    """Where |x| is at most one half."""
    return x * quotient(x * x, ERFINV["double"])


def erfcinv(z: Value, tiny: bool) -> Value:
    """The v with erfc(v) = z, z at most one half. Below 2^-53 only when `tiny` is told."""
    s = sqrt(-log(z))
    ratio = select(s < 2.5, quotient(s - 0.825, ERFCINV_1["double"]), quotient(s - 2.5, ERFCINV_2["double"]))
    if tiny:
        ratio = select(s < 7.0, ratio, quotient(s - 7.0, ERFCINV_3["double"]))
    return s * ratio


def erfinv(x: Value) -> Value:
    a = fabs(x)
    large = select(a < 1.0, erfcinv(1.0 - a, tiny=False), INFINITY)
    result = copysign(select(a > 0.5, large, erfinv_of_small(a)), x)
    return select(a > 1.0, NAN, result)


def ndtri(p: Value) -> Value:
    """The root of two times erfinv(2 p - 1)."""
    x = fma(p, 2.0, -1.0)
    less = minimum(p, 1.0 - p)
    large = copysign(select(less > 0.0, erfcinv(less + less, tiny=True), INFINITY), x)
    result = select(fabs(x) > 0.5, large, erfinv_of_small(x)) * ROOT_OF_2["double"][0]
    return select((p < 0.0) | (p > 1.0), NAN, result)


def scaled_complement(a: Value) -> Value:
    """exp(a^2) erfc(a) of what is not negative."""
    inverse = 1.0 / a
    square = inverse * inverse
    far = inverse * ONE_OVER_ROOT_PI * polynomial(square, ASYMPTOTIC)
    near = scaled_erfc(minimum(a, ERFC_IS_ZERO["double"])) / fma(a, 2.0, 1.0)
    return select(a < ERFC_IS_ZERO["double"], near, far)


def exp_of_square(a: Value, factor: float) -> tuple[Value, Value, Value]:
    """Factors of exp(factor a^2), where the factor is a power of two or its negative."""
    square = a * a
    return exp_in_parts(square * factor, fma(a, a, -square) * factor)


def erfcx(x: Value) -> Value:
    a = fabs(x)
    result = scaled_complement(a)
    near_one, first, second = exp_of_square(minimum(a, 26.7), 1.0)
    reflected = fma(near_one * first, second + second, -result)
    return select(x < 0.0, reflected, result)


def tail_from(scaled: Value, a: Value) -> Value:
    """erfc(a / sqrt(2)) / 2 of what is not negative, from the scaled complement."""
    near_one, first, second = exp_of_square(minimum(a, NORMAL_IS_ZERO["double"]), -0.5)
    return scaled * 0.5 * near_one * first * second


def tail_of_single(a: Value) -> Value:
    """The same of floats: exp(-a^2 / 2) times a quotient of polynomials.

    a^2 = z - 2 n ln 2 with a whole n. n times the high part of ln 2 is exact, so that z has no error of a rounded a^2.
    The quotient is scaled down and 2^n up: both are normal numbers, and a subnormal result is rounded once.
    """
    a = minimum(a, NORMAL_IS_ZERO["float"])
    start = shifter("float", EXPONENT_BIAS["float"] + SCALE)
    shifted = fma(a * a, -0.5 * LOG2_OF_E["double"][0], start)
    n = shifted - start
    z = fma(n, 2.0 * SHORT_LN2[1], fma(a, a, n * (2.0 * SHORT_LN2[0])))
    one, *others = NORMAL_EXP["float"]
    power = fma(z, polynomial_in_halves(z, others), one)
    return power * power_of_two(shifted) * quotient(a, SCALED_TAIL)


def ndtr(x: Value) -> Value:
    """erfc(-x / sqrt(2)) / 2."""
    a = fabs(x)
    tail = tail_of_single(a) if x.element == "float" else tail_from(scaled_complement(a * ROOT_OF_HALF["double"][0]), a)
    return select(x < 0.0, tail, 1.0 - tail)


def log_ndtr(x: Value) -> Value:
    """log(erfc(-x / sqrt(2)) / 2)."""
    a = fabs(x)
    scaled = scaled_complement(a * ROOT_OF_HALF["double"][0])
    low = log(scaled * 0.5) - a * a * 0.5
    tail = tail_from(scaled, a)
    high = log1p(-select(x < 0.0, 1.0 - tail, tail))
    return select(x < -1.0, low, high)


def _function(name: str, body: Body, f64: float, method: str) -> MathFunction:
    return MathFunction(name, body, 0.51, f64, wide=True, inline=False, method=method + "; f32 in f64")


FUNCTIONS = (
    _function("erfinv", erfinv, 6.0, "quotients of polynomials of x or of the root of the logarithm of 1 - x"),
    MathFunction("special_ndtr", ndtr, f32=8.0, f64=4.0, method="exp(-x^2 / 2) times a quotient of polynomials"),
    _function("special_ndtri", ndtri, 6.0, "as erfinv"),
    _function("special_erfcx", erfcx, 5.0, "the polynomial of erfc; far out its asymptotic series"),
    _function("special_log_ndtr", log_ndtr, 6.0, "erfcx and log, or log1p"),
)
