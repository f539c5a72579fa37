"""Powers of e and of two, and what is one division away from them.

x = n ln 2 + r with a whole n, so that exp(x) = 2^n exp(r) and r is small. Adding a number whose last place is 1 rounds
to n and leaves n in the low bits of the sum, from where a shift makes 2^n. Near the ends of the range 2^n itself is no
float: it is multiplied in two halves, which also rounds results that are subnormal once only.

Numbers far below what gives zero are cut off where the power of two itself is the zero that its bits then are: a
product that is too small for a float takes some processors a hundred times as long, and what masks hide from a softmax
lies there.
"""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import LN2, LOG2_OF_E
from ferrite.codegen.coefficients.elementary import EXP, EXP2, EXPM1
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.text import (
    EXPONENT_BIAS,
    FRACTION_BITS,
    Value,
    bits,
    fabs,
    fma,
    from_bits,
    maximum,
    minimum,
    polynomial,
    select,
)

# Beyond these exp overflows or gives zero.
OVERFLOW = {"float": 89.0, "double": 710.0}
UNDERFLOW = {"float": -104.0, "double": -746.0}
OVERFLOW2 = {"float": 129.0, "double": 1025.0}
# Here 2^n has no bits: as two halves, and scaled up.
ZERO = {"float": -176.0, "double": -1418.0}
ZERO2 = {"float": -254.0, "double": -2046.0}
ZERO_OF_NEGATIVE = {"float": -131.5, "double": -1063.0}


def shifter(element: str, bias: int) -> float:
    """Added to a small number, it leaves in the low bits of the sum the nearest whole number plus `bias`."""
    return 1.5 * 2.0 ** FRACTION_BITS[element] + bias


def power_of_two(shifted: Value) -> Value:
    """2^n of a sum with `shifter` and the bias of the type."""
    return from_bits(bits(shifted) << FRACTION_BITS[shifted.element])


def halves_of_power(shifted: Value) -> tuple[Value, Value]:
    """Two floats whose product is 2^n, of a sum with `shifter` and twice the bias of the type."""
    count = FRACTION_BITS[shifted.element]
    raw = bits(shifted)
    half = raw.unsigned_shift(1)
    return from_bits(half << count), from_bits((raw - half) << count)


def reduced(x: Value, bias: int) -> tuple[Value, Value, Value]:
    """n as it stands in the shifted sum, n, and r with x = n ln 2 + r."""
    high, low, _ = LN2[x.element]
    start = shifter(x.element, bias)
    shifted = fma(x, LOG2_OF_E[x.element][0], start)
    n = shifted - start
    return shifted, n, fma(n, -low, fma(n, -high, x))


def exp_in_parts(x: Value, small: Value | None = None) -> tuple[Value, Value, Value]:
    """Three factors of exp(x), for x between ZERO and OVERFLOW: a number near one and two powers of two.

    With `small`, of exp(x + small), where it is no more than what x lost in rounding.
    """
    shifted, _, r = reduced(x, 2 * EXPONENT_BIAS[x.element])
    near_one = polynomial(r, EXP[x.element])
    if small is not None:
        slope = polynomial(r, EXP[x.element][1:])
        near_one = fma(r, slope, small * near_one) + 1.0
    return near_one, *halves_of_power(shifted)


def exp(x: Value) -> Value:
    x = minimum(maximum(x, ZERO[x.element]), OVERFLOW[x.element])
    near_one, first, second = exp_in_parts(x)
    return near_one * first * second


def exp2(x: Value) -> Value:
    x = minimum(maximum(x, ZERO2[x.element]), OVERFLOW2[x.element])
    start = shifter(x.element, 2 * EXPONENT_BIAS[x.element])
    shifted = x + start
    near_one = polynomial(x - (shifted - start), EXP2[x.element])
    first, second = halves_of_power(shifted)
    return near_one * first * second


def exp_of_moderate(x: Value) -> Value:
    """exp where it is a normal number."""
    shifted, _, r = reduced(x, EXPONENT_BIAS[x.element])
    return polynomial(r, EXP[x.element]) * power_of_two(shifted)


def exp_of_negative(x: Value) -> Value:
    """exp of what is not above zero.

    The polynomial is scaled down and 2^n up: both are normal numbers, and a subnormal result is rounded once.
    """
    scale = EXPONENT_BIAS[x.element] // 2
    shifted, _, r = reduced(maximum(x, ZERO_OF_NEGATIVE[x.element]), EXPONENT_BIAS[x.element] + scale)
    return polynomial(r, [value * 2.0**-scale for value in EXP[x.element]]) * power_of_two(shifted)


def expm1_of(x: Value) -> Value:
    """exp(x) - 1 where exp(x) is neither tiny nor too large; the sign of zero may be lost."""
    element = x.element
    high, low, _ = LN2[element]
    start = shifter(element, EXPONENT_BIAS[element] - 1)
    shifted = fma(x, LOG2_OF_E[element][0], start)
    n = shifted - start
    exact = fma(n, -high, x)
    r = fma(n, -low, exact)
    lost = fma(n, -low, exact - r)
    half_power = power_of_two(shifted)  # 2^n itself may be too large
    # 2^n r + (2^n - 1), halved, and what its rounding loses; then the rest of the series
    offset, slope = half_power - 0.5, half_power * r
    total = offset + slope
    rest = fma(r * r, polynomial(r, EXPM1[element]), lost)
    return 2.0 * (total + fma(half_power, rest, slope - (total - offset)))


def expm1(x: Value) -> Value:
    # Below the lower bound the result is -1.
    result = expm1_of(minimum(maximum(x, -18.0 if x.element == "float" else -40.0), OVERFLOW[x.element]))
    # Keeps the sign of zero and what is too small to be halved.
    return select(fabs(x) < 2.0 ** -(FRACTION_BITS[x.element] + 2), x, result)


def sigmoid(x: Value) -> Value:
    power = exp_of_negative(-fabs(x))
    return select(x < 0.0, power, 1.0) / (power + 1.0)


FUNCTIONS = (
    MathFunction("exp", exp, f32=1.0, f64=1.0, method="2^n times a polynomial"),
    MathFunction("exp2", exp2, f32=1.0, f64=1.0, method="2^n times a polynomial"),
    MathFunction("expm1", expm1, f32=1.5, f64=1.5, method="2^n times a polynomial, plus 2^n - 1"),
    MathFunction("sigmoid", sigmoid, f32=2.5, f64=2.5, method="exp of minus its size, one division"),
)
