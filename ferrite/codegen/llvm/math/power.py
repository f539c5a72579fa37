"""x to the y, as exp(y log|x|) with more digits than the result has.

f32 computes in f64. f64 keeps the logarithm and its product with y as sums of two floats.
"""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import LN2, in_parts
from ferrite.codegen.coefficients.elementary import LOG_FOR_POWER, LOG_REST
from ferrite.codegen.llvm.math.exp import OVERFLOW, UNDERFLOW, exp_in_parts, exp_of_moderate
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.log import split
from ferrite.codegen.llvm.math.text import (
    INFINITY,
    NAN,
    Value,
    copysign,
    fabs,
    fma,
    maximum,
    minimum,
    narrow,
    polynomial,
    select,
    trunc,
    widen,
)

TWO_THIRDS = in_parts("0.66666666666666666666666666666666666666666666666666666666667")


def log_in_parts(x: Value) -> tuple[Value, Value]:
    """The logarithm of a positive double as a sum whose second part is small; off by some 2^-68 of it."""
    e, f = split(x)
    under = f + 2.0
    inverse = 1.0 / under
    s = f * inverse
    s_low = (fma(-s, under, f) - s * (f - (under - 2.0))) * inverse
    # log(1 + f) = s (2 + 2/3 s^2 + ...), with s = f / (2 + f): the first two terms in two parts each
    z = s * s
    z_low = fma(s, s, -z) + 2.0 * s * s_low
    high, low, _ = TWO_THIRDS["double"]
    tail = fma(z, polynomial(z, LOG_REST["double"]), low)
    factor = high + tail
    factor_low = (high - factor) + tail
    term = z * factor
    term_low = fma(z, factor, -term) + fma(z, factor_low, z_low * factor)
    total = 2.0 + term
    total_low = ((2.0 - total) + term) + term_low
    log_f = s * total
    log_f_low = fma(s, total, -log_f) + fma(s, total_low, s_low * total)
    ln2, ln2_low, _ = LN2["double"]
    log_e = e * ln2
    log_e_low = fma(e, ln2_low, fma(e, ln2, -log_e))
    result = log_e + log_f
    return result, ((log_e - result) + log_f) + (log_f_low + log_e_low)


def rough_log(x: Value) -> Value:
    """The logarithm of a positive double to 2^-37 of it."""
    e, f = split(x)
    s = f / (f + 2.0)
    z = s * s
    return fma(e, LN2["double"][0], s * fma(z, polynomial(z, LOG_FOR_POWER["double"]), 2.0))


def at_the_ends(a: Value, log: Value) -> Value:
    """The logarithm of zero, of infinity and of NaN too."""
    return select(a.equals(0.0), -INFINITY, select(a < INFINITY, log, a))


def rough_power(a: Value, y: Value) -> Value:
    product = y * at_the_ends(a, rough_log(a))
    return exp_of_moderate(minimum(maximum(product, -200.0), 200.0))


def exact_power(a: Value, y: Value) -> Value:
    log, log_low = log_in_parts(a)
    log = at_the_ends(a, log)
    product = y * log
    product_low = fma(y, log_low, fma(y, log, -product))
    product_low = select(fabs(product) < OVERFLOW["double"] + 40.0, product_low, 0.0)
    product = minimum(maximum(product, UNDERFLOW["double"]), OVERFLOW["double"])
    near_one, first, second = exp_in_parts(product, product_low)
    return near_one * first * second


def pow(x: Value, y: Value) -> Value:
    if x.element == "float":
        return narrow(with_special_cases(widen(x), widen(y), rough_power(fabs(widen(x)), widen(y))))
    return with_special_cases(x, y, exact_power(fabs(x), y))


def with_special_cases(x: Value, y: Value, result: Value) -> Value:
    """What C99 says of signs, ones, zeros and infinities, where the product of y and the logarithm does not say it."""
    is_whole = trunc(y).equals(y)
    is_odd = is_whole & trunc(y * 0.5).differs(y * 0.5)
    result = select(fabs(x).equals(1.0) & fabs(y).equals(INFINITY), 1.0, result)
    result = copysign(result, select(is_odd, x, 1.0))
    result = select((x < 0.0) & x.differs(-INFINITY) & ~is_whole, NAN, result)
    return select(x.equals(1.0) | y.equals(0.0), 1.0, result)


FUNCTIONS = (
    MathFunction("pow", pow, f32=1.0, f64=1.0, arity=2, method="exp(y log x): f32 in f64, f64 with sums of two floats"),
)
