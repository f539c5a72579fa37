"""Functions that neither Triton nor CUDA's library has, as text of Triton helpers.

Special functions have the coefficients of those for CPUs. Floats of 32 bits are computed in 32 bits where nothing
cancels, else in 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.codegen.coefficients.constants import DIGAMMA_ZERO
from ferrite.codegen.coefficients.special import (
    AIRY_COSINE,
    AIRY_DECAY,
    AIRY_MIDDLE,
    AIRY_SINE,
    DIGAMMA_LARGE,
    DIGAMMA_ROOT,
    I0_LARGE,
    I0_SMALL,
    I1_LARGE,
    I1_SMALL,
    K0_LARGE,
    K0_SMALL,
    K1_LARGE,
    K1_SMALL,
)

PI = 3.141592653589793


def polynomial(x: str, coefficients: Sequence[float]) -> str:
    """c[0] + c[1] x + c[2] x^2 + ... by Horner's rule."""
    text = repr(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        text = f"({coefficient!r} + {x} * {text})"
    return text


# --- modified Bessel functions ----------------------------------------------------------------------------------------


def _scaled_bessel(name: str, small: str, large: Sequence[float], sign: str) -> str:
    """Times exp(-|x|): up to 8 a series, beyond a polynomial of 1 / x."""
    return f"""
def {name}(value):
    size = tl.abs(value)
    square = size * size * 0.25
    near = {small} * libdevice.exp(size * (-1.0))
    far = divide({polynomial("(16.0 / size - 1.0)", large)}, square_root(size))
    found = tl.where(size < 8.0, near, far)
    return {sign}
"""


BESSEL = (
    _scaled_bessel("scaled_bessel_i0", polynomial("square", I0_SMALL["double"]), I0_LARGE["double"], "found"),
    _scaled_bessel(
        "scaled_bessel_i1",
        f"size * 0.5 * {polynomial('square', I1_SMALL['double'])}",
        I1_LARGE["double"],
        "libdevice.copysign(found, value)",
    ),
)

# --- the derivative of the logarithm of the gamma function ------------------------------------------------------------

_HIGH, _LOW, _ = DIGAMMA_ZERO["double"]
DIGAMMA = (
    f"""
def digamma_from_one(value):
    # up to 3 by its root, beyond by Stirling's formula
    middle = (value >= 2.0) & (value < 3.0)
    near = tl.where(middle, value - 1.0, value)
    place = near - 1.0
    top = {polynomial("place", DIGAMMA_ROOT["double"][0])}
    small = ((near - {_HIGH!r}) - {_LOW!r}) * (top / {polynomial("place", DIGAMMA_ROOT["double"][1])})
    small = tl.where(middle, small + 1.0 / (value - 1.0), small)
    inverse = 1.0 / value
    square = inverse * inverse
    large = libdevice.log(value) - (inverse * 0.5 + square * {polynomial("square", DIGAMMA_LARGE["double"])})
    return tl.where(value < 3.0, small, large)
""",
    f"""
def digamma_of_double(value):
    # that of x is that of x + 1, less 1 / x; and that of 1 - x, less pi / tan(pi x)
    size = tl.abs(value)
    raised = (value < 1.0) & (value > float("-inf"))
    found = digamma_from_one(tl.where(raised, size + 1.0, size))
    turn = (size - libdevice.rint(size)) * {PI!r}
    reflected = libdevice.cos(turn) * {PI!r} / libdevice.sin(turn)
    found = tl.where(raised, found + tl.where(value < 0.0, reflected, (-1.0) / size), found)
    found = tl.where((value < 0.0) & (libdevice.rint(value) == value), float("nan"), found)
    return tl.where(value == 0.0, libdevice.copysign(size + float("inf"), value * (-1.0)), found)
""",
    """
def digamma(value):
    return tl.cast(digamma_of_double(tl.cast(value, tl.float64)), value.dtype)
""",
)

# --- parts of a float -------------------------------------------------------------------------------------------------


def _parts(bits: int, fraction: int, bias: int) -> str:
    """Of floats of a size: numbers that are too small are made larger first."""
    more, ones = fraction + 2, 2 * bias + 1
    kept = ~(ones << fraction)
    return f"""
def float_parts_{bits}(value):
    # mantissa and exponent; zeros, infinities and what is no number are their own mantissa
    tiny = tl.abs(value) < {2.0 ** (1 - bias)!r}
    words = tl.cast(tl.where(tiny, value * {2.0**more!r}, value), tl.int{bits}, bitcast=True)
    field = (words >> {fraction}) & {ones}
    odd = (value == 0) | (field == {ones})
    exponent = tl.where(odd, 0, field - tl.where(tiny, {bias - 1 + more}, {bias - 1}))
    mantissa = tl.cast((words & {kept}) | {bias - 1 << fraction}, tl.float{bits}, bitcast=True)
    return tl.where(odd, value, mantissa), exponent
"""


FLOAT_PARTS = (
    _parts(32, 23, 127),
    _parts(64, 52, 1023),
    """
def float_mantissa(value):
    if value.dtype == tl.float64:
        mantissa, exponent = float_parts_64(value)
        return mantissa
    else:
        mantissa, exponent = float_parts_32(value)
        return mantissa
""",
    """
def float_exponent(value):
    if value.dtype == tl.float64:
        mantissa, exponent = float_parts_64(value)
        return tl.cast(exponent, tl.int32)
    else:
        mantissa, exponent = float_parts_32(value)
        return tl.cast(exponent, tl.int32)
""",
)

# --- integers ---------------------------------------------------------------------------------------------------------

INTEGERS = (
    """
def integer_power(base, exponent):
    # to a negative power only 1 and -1 are something; what is added times 0 makes blocks of one shape of both
    found = base * 0 + 1
    square = base + found * 0
    rest = tl.where(exponent > 0, exponent, 0) + found * 0
    for _ in range(0, base.dtype.primitive_bitwidth):
        found = tl.where((rest & 1) != 0, found * square, found)
        square = square * square
        rest = rest >> 1
    odd = tl.where((exponent & 1) != 0, base, found * 0 + 1)
    inverse = tl.where(base == 1, found * 0 + 1, tl.where(base + 1 == 0, odd, found * 0))
    return tl.where(exponent < 0, inverse, found)
""",
    """
def some_lane(condition):
    if condition.type.is_block():
        return tl.reduce(tl.cast(condition, tl.int32), None, either_bits)
    else:
        return tl.cast(condition, tl.int32)
""",
    """
def common_divisor(left, right):
    # Euclid's, until no lane has a rest; both as blocks of one shape
    left, right = left + right * 0, right + left * 0
    while some_lane(left != 0) != 0:
        done = left == 0
        rest = right % tl.where(done, left * 0 + 1, left)
        right = tl.where(done, right, left)
        left = tl.where(done, left, rest)
    return right
""",
    """
def product_over(left, right, divisor):
    none = divisor == 0
    return tl.where(none, divisor, left // tl.where(none, divisor * 0 + 1, divisor) * right)
""",
    """
def common_multiple(left, right, divisor):
    # short integers are wider until the end, as in C
    if left.dtype.primitive_bitwidth < 32:
        wide = product_over(tl.cast(left, tl.int32), tl.cast(right, tl.int32), tl.cast(divisor, tl.int32))
        return tl.cast(tl.abs(wide), left.dtype)
    else:
        return tl.abs(product_over(left, right, divisor))
""",
)

# --- of the second kind, and below a wave ----------------------------------------------------------------------------


def _bessel_k(order: int, scaled: bool) -> str:
    """Up to 2 a series beside a logarithm, beyond a polynomial of 1 / x."""
    small, large = (K0_SMALL, K0_LARGE) if order == 0 else (K1_SMALL, K1_LARGE)
    regular = polynomial("square", small["double"])
    if order == 0:
        near = f"{regular} - log * {polynomial('square', I0_SMALL['double'])}"
    else:
        near = f"{regular} / x + log * x * 0.5 * {polynomial('square', I1_SMALL['double'])}"
    times_near, times_far = (" * libdevice.exp(x)", "") if scaled else ("", " * libdevice.exp(x * (-1.0))")
    return f"""
def {"scaled_" * scaled}bessel_k{order}(value):
    x = tl.cast(value, tl.float64)
    square = x * x * 0.25
    log = libdevice.log(x * 0.5)
    near = ({near}){times_near}
    far = {polynomial("(4.0 / x - 1.0)", large["double"])} / tl.sqrt(x){times_far}
    found = tl.where(x <= 2.0, near, far)
    found = tl.where(x == 0.0, float("inf"), tl.where(x < 0.0, float("nan"), found))
    return tl.cast(found, value.dtype)
"""


def _quotient(x: str, table: Sequence[Sequence[float]]) -> str:
    return f"({polynomial(x, table[0])} / {polynomial(x, table[1])})"


AIRY = f"""
def airy_ai(value):
    x = tl.cast(value, tl.float64)
    size = tl.abs(x)
    quarter = tl.sqrt(tl.sqrt(size))
    z = size * tl.sqrt(size) * {2 / 3!r}
    w = 1.0 / z
    square = w * w
    high = libdevice.exp(z * (-1.0)) * {_quotient("w", AIRY_DECAY["double"])} * {0.5 / PI**0.5!r} / quarter
    sine = libdevice.sin(z + {PI / 4!r}) * {_quotient("square", AIRY_SINE["double"])}
    cosine = libdevice.cos(z + {PI / 4!r}) * w * {_quotient("square", AIRY_COSINE["double"])}
    low = (sine - cosine) * {PI**-0.5!r} / quarter
    found = tl.where(size <= 2.0, {polynomial("x", AIRY_MIDDLE["double"])}, tl.where(x > 0.0, high, low))
    return tl.cast(tl.where(size == float("inf"), float("nan"), found), value.dtype)
"""

SPHERICAL_BESSEL = f"""
def spherical_bessel_j0(value):
    square = value * value
    near = {polynomial("square", [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)])}
    found = tl.where(tl.abs(value) < 0.5, near, divide(libdevice.sin(value), value))
    return tl.where(tl.abs(value) == float("inf"), 0.0, found)
"""

SECOND_KIND = (*(_bessel_k(order, scaled) for order in (0, 1) for scaled in (False, True)), AIRY, SPHERICAL_BESSEL)

SPECIAL_FUNCTIONS = (*BESSEL, *SECOND_KIND, *DIGAMMA, *FLOAT_PARTS, *INTEGERS)
