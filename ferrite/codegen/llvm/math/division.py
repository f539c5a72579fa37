"""Remainders, exact, and the length of a vector."""

from __future__ import annotations

from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.rare import rare_by_libm
from ferrite.codegen.llvm.math.text import (
    FRACTION_BITS,
    INFINITY,
    Value,
    bits,
    copysign,
    fabs,
    fma,
    from_bits,
    maximum,
    minimum,
    narrow,
    select,
    sqrt,
    trunc,
    widen,
)


def fmod(x: Value, y: Value) -> Value:
    """x - y trunc(x / y), without rounding.

    The quotient may be rounded up to a whole number, never down past one: the remainder is right or one |y| too small.
    It is a float in both cases, so that fma is exact. A quotient of more digits than a float has goes to libm.
    """
    a, b = fabs(x), fabs(y)
    quotient = trunc(a / b)
    remainder = fma(-quotient, b, a)
    remainder = select(remainder < 0.0, remainder + b, remainder)
    remainder = select(b.equals(INFINITY) & (a < INFINITY), a, remainder)
    many = quotient >= 2.0 ** FRACTION_BITS[x.element]
    return rare_by_libm(many, copysign(remainder, x), "fmod", x, y)


def remainder(x: Value, y: Value) -> Value:
    """With the sign of y, as in Python."""
    result = fmod(x, y)
    other_sign = result.differs(0.0) & ((result < 0.0) ^ (y < 0.0))
    return select(other_sign, result + y, result)


def hypot(x: Value, y: Value) -> Value:
    if x.element == "float":
        wide_x, wide_y = widen(x), widen(y)
        result = narrow(sqrt(fma(wide_x, wide_x, wide_y * wide_y)))
    else:
        result = scaled_hypot(maximum(fabs(x), fabs(y)), minimum(fabs(x), fabs(y)))
    # Infinite beside NaN too.
    return select(fabs(x).equals(INFINITY) | fabs(y).equals(INFINITY), INFINITY, result)


def scaled_hypot(large: Value, small: Value) -> Value:
    """Both are scaled by a power of two, so that no square overflows or is lost."""
    exponent = bits(minimum(maximum(large, 2.0**-1000), 2.0**1000)) & (0x7FF << 52)
    down, up = from_bits((2046 << 52) - exponent), from_bits(exponent)
    a, b = large * down, small * down
    square = a * a
    total = fma(b, b, square)
    lost = fma(b, b, square - total) + fma(a, a, -square)
    root = sqrt(total)
    # one step of Newton's for what the root lost
    better = root + (fma(-root, root, total) + lost) / (root + root)
    return select(total > 0.0, better, root) * up


FUNCTIONS = (
    MathFunction("fmod", fmod, f32=0.0, f64=0.0, arity=2, method="exact by fma; libm for quotients of many digits"),
    MathFunction("remainder", remainder, f32=0.5, f64=0.5, arity=2, method="fmod, moved to the sign of the divisor"),
    MathFunction("hypot", hypot, f32=0.51, f64=1.0, arity=2, method="root of a scaled sum of squares; f32 in f64"),
)
