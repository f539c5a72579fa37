"""Logarithms.

x = 2^e (1 + f) with 1 + f between the roots of one half and of two. log(1 + f) = f + rest, where the rest is far
smaller than f for small f, so that the last addition alone decides the error.
"""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import LN2, LOG2_OF_E, LOG10_OF_2, LOG10_OF_E
from ferrite.codegen.coefficients.elementary import LOG, LOG_BY_QUOTIENT
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.text import (
    EXPONENT_BIAS,
    FRACTION_BITS,
    INFINITY,
    NAN,
    Value,
    bits,
    fabs,
    fma,
    from_bits,
    polynomial,
    polynomial_in_halves,
    select,
    to_float,
)

ROOT_OF_HALF = {"float": 0x3F3504F3, "double": 0x3FE6A09E667F3BCD}
SMALLEST_NORMAL = {"float": 2.0**-126, "double": 2.0**-1022}


def exponent_and_fraction(x: Value) -> tuple[Value, Value]:
    """e, as an integer, and 1 + f, of a positive normal number."""
    count, start = FRACTION_BITS[x.element], ROOT_OF_HALF[x.element]
    above = bits(x) - start
    return above >> count, from_bits((above & ((1 << count) - 1)) + start)


def split(x: Value) -> tuple[Value, Value]:
    """e and f, both floats, of a positive number; subnormal numbers are scaled up first."""
    scale = FRACTION_BITS[x.element] + 1
    small = x < SMALLEST_NORMAL[x.element]
    e, fraction = exponent_and_fraction(select(small, x * 2.0**scale, x))
    return to_float(e) - select(small, x.like(float(scale)), 0.0), fraction - 1.0


def rest_of_log(f: Value) -> Value:
    """log(1 + f) - f."""
    if f.element == "float":
        square = f * f
        return fma(square * f, polynomial_in_halves(f, LOG[f.element]), square * -0.5)
    s = f / (f + 2.0)
    z = s * s
    half_square = f * f * 0.5
    return fma(s, fma(z, polynomial(z, LOG_BY_QUOTIENT[f.element]), half_square), -half_square)


def log_from_parts(e: Value, f: Value, lost: Value | None = None) -> Value:
    """`lost`: what f lacks of the exact fraction."""
    high, low, _ = LN2[f.element]
    rest = rest_of_log(f)
    if lost is not None:
        rest = rest + fma(lost, -f, lost)
    return fma(e, high, f + fma(e, low, rest))


def where_defined(x: Value, result: Value) -> Value:
    """The logarithm of what is no positive finite number."""
    result = select(x < INFINITY, result, x)
    result = select(x < 0.0, NAN, result)
    return select(x.equals(0.0), -INFINITY, result)


def log(x: Value) -> Value:
    return where_defined(x, log_from_parts(*split(x)))


def log2(x: Value) -> Value:
    e, f = split(x)
    high, low, _ = LOG2_OF_E[x.element]
    return where_defined(x, e + fma(f, high, fma(f, low, rest_of_log(f) * high)))


def log10(x: Value) -> Value:
    e, f = split(x)
    high, low, _ = LOG10_OF_E[x.element]
    two_high, two_low, _ = LOG10_OF_2[x.element]
    small = fma(e, two_low, fma(f, low, rest_of_log(f) * high))
    return where_defined(x, fma(e, two_high, fma(f, high, small)))


def log1p(x: Value) -> Value:
    element, count = x.element, FRACTION_BITS[x.element]
    e, _ = exponent_and_fraction(x + 1.0)
    # f = x 2^-e + (2^-e - 1); four times 2^-e is a normal number for every e.
    scale = from_bits(((EXPONENT_BIAS[element] + 2) - e) << count)
    scaled, offset = x * 0.25 * scale, fma(scale, 0.25, -1.0)
    f = scaled + offset
    lost = scaled - (f - offset)
    result = log_from_parts(to_float(e), f, lost)
    result = select(x < INFINITY, result, x)
    result = select(x < -1.0, NAN, result)
    result = select(x.equals(-1.0), -INFINITY, result)
    # Keeps the sign of zero and what is too small for the product.
    return select(fabs(x) < 2.0 ** -(count + 2), x, result)


FUNCTIONS = (
    MathFunction("log", log, f32=1.0, f64=1.0, method="exponent times ln 2 plus a polynomial of the fraction"),
    MathFunction("log2", log2, f32=1.5, f64=1.5, method="as log, in units of ln 2"),
    MathFunction("log10", log10, f32=1.5, f64=1.5, method="as log, in units of ln 10"),
    MathFunction("log1p", log1p, f32=1.0, f64=1.0, method="as log, with the fraction taken from x itself"),
)
