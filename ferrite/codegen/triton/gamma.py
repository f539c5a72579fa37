"""Zeta and gamma functions of two arguments, as text of Triton helpers. All is computed in 64 bits."""

from __future__ import annotations

import math
from fractions import Fraction

from ferrite.codegen.triton.special_functions import polynomial

MIN_TERMS, MIN_END = 9.0, 9.0  # of the sum of zeta, and where it ends, before the formula for the rest
EPSILON = 2.0**-53
MIN_UNIFORM = 200.0  # the first argument of the incomplete gamma functions, from which on the uniform expansion holds
LIMIT = 2.0**-30  # terms of their series that no float of 32 bits shows
# Of the uniform expansion near its middle, over eta.
FIRST = (-1 / 3, 1 / 12, -2 / 135, 1 / 864, 1 / 2835, -139 / 777600)
SECOND = (-1 / 540, -1 / 288, 1 / 378, -77 / 77760, 1 / 4860)


def bernoulli(count: int) -> list[Fraction]:
    """The first Bernoulli numbers of even index, from the second on."""
    numbers = [Fraction(1)]
    for n in range(1, 2 * count + 1):
        numbers.append(-sum((math.comb(n + 1, k) * numbers[k] for k in range(n)), Fraction(0)) / (n + 1))
    return numbers[2::2]


def _rest_of_zeta() -> str:
    """The terms of Euler's and Maclaurin's formula; lanes whose terms do not matter any more are done."""
    lines = []
    for k, number in enumerate(bernoulli(12), 1):
        factor = float(number / math.factorial(2 * k))
        lines += [
            f"term = rising * power * {factor!r}",
            f"done = done | ~(tl.abs(term) >= {EPSILON!r} * tl.abs(total))",
            "total = total + tl.where(done, 0.0, term)",
            f"rising = rising * (exponent + {2.0 * k - 1.0}) * (exponent + {2.0 * k})",
            "power = power / (end * end)",
        ]
    return "\n    ".join(lines)


ZETA = (
    f"""
def hurwitz_zeta(given, start):
    # a sum of powers of start, start + 1, ...
    exponent, first = tl.cast(given, tl.float64), tl.cast(start, tl.float64)
    total = libdevice.pow(first, exponent * (-1.0))
    end = tl.where(total == total, first, first)
    exponent = tl.where(total == total, exponent, exponent)
    last = total
    zero = tl.full([], 0.0, tl.float64)
    count = tl.where(total == total, zero, zero)
    done = (exponent <= 1.0) | ((first <= 0.0) & (tl.floor(first) == first)) | ~(total == total)
    while some_lane(~done & ((count < {MIN_TERMS}) | (end <= {MIN_END}))) != 0:
        goes_on = ~done & ((count < {MIN_TERMS}) | (end <= {MIN_END}))
        end = tl.where(goes_on, end + 1.0, end)
        last = tl.where(goes_on, libdevice.pow(end, exponent * (-1.0)), last)
        total = tl.where(goes_on, total + last, total)
        done = done | (goes_on & (tl.abs(last) < {EPSILON!r} * tl.abs(total)))
        count = count + 1.0
    total = total + tl.where(done, 0.0, last * end / (exponent - 1.0) - 0.5 * last)
    rising = exponent
    power = last / end
    {_rest_of_zeta()}
    is_pole = (first <= 0.0) & (tl.floor(first) == first)
    total = tl.where((exponent != exponent) | (first != first), float("nan"), total)
    total = tl.where((exponent > 1.0) & (first == float("inf")), 0.0, total)
    total = tl.where((first <= 0.0) & (tl.floor(exponent) != exponent), float("nan"), total)
    total = tl.where(is_pole, float("inf"), total)
    return tl.where(exponent < 1.0, float("nan"), tl.where(exponent == 1.0, float("inf"), total))
""",
    """
def zeta(given, start):
    return tl.cast(hurwitz_zeta(given, start), start.dtype)
""",
)

INCOMPLETE_GAMMA = (
    f"""
def uniform_upper_gamma(a, x):
    # Temme's expansion, two terms of it: eta^2 / 2 = u - log(1 + u), where u = x / a - 1
    u = (x - a) / a
    near = tl.abs(u) < 0.01
    series = u * u * {polynomial("u", [(-1.0) ** k / (k + 2) for k in range(7)])}
    half = tl.where(near, series, u - libdevice.log1p(u))
    eta = libdevice.copysign(tl.sqrt(half + half), u)
    middle = tl.abs(eta) < 0.02
    safe = tl.where(middle, 1.0, eta)
    v = tl.where(middle, 1.0, u)
    first = tl.where(middle, {polynomial("eta", FIRST)}, 1.0 / v - 1.0 / safe)
    far = 1.0 / (safe * safe * safe) - 1.0 / (v * v * v) - 1.0 / (v * v) - 1.0 / (12.0 * v)
    second = tl.where(middle, {polynomial("eta", SECOND)}, far)
    wave = libdevice.exp(half * a * (-1.0)) / tl.sqrt(a * {2 * math.pi!r}) * (first + second / a)
    z = eta * tl.sqrt(a * 0.5)
    return libdevice.erfc(z) * 0.5 + wave, libdevice.erfc(z * (-1.0)) * 0.5 - wave
""",
    f"""
def gamma_parts(given, place):
    # the lower part of the integral, and the upper one
    a, x = tl.cast(given, tl.float64), tl.cast(place, tl.float64)
    plain = (a > 0.0) & (x > 0.0) & (a < float("inf")) & (x < float("inf"))
    large = plain & (a > {MIN_UNIFORM})
    b = tl.where(plain & ~large, a, 1.0)
    y = tl.where(plain & ~large, x, 1.0)
    scale = libdevice.exp(b * libdevice.log(y) - y - libdevice.lgamma(b))
    by_series = y < tl.where(b > 1.0, b, 1.0) + 0.1
    # a series
    term = b / b
    total = term
    count = tl.full([], 0.0, tl.float64)
    going = by_series
    while some_lane(going) != 0:
        count = count + 1.0
        term = term * y / (b + count)
        total = tl.where(going, total + term, total)
        going = going & (term > total * {LIMIT!r})
    lower = scale * total / b
    # a continued fraction, from its beginning on
    low = y + 1.0 - b
    right = 1.0 / tl.where(by_series, 1.0, low)
    ratio = tl.full([], 1e300, tl.float64) + low * 0.0
    fraction = right
    count = tl.full([], 0.0, tl.float64)
    going = ~by_series
    while some_lane(going) != 0:
        count = count + 1.0
        part = count * (b - count)
        low = low + 2.0
        right = part * right + low
        right = 1.0 / tl.where(tl.abs(right) < 1e-300, 1e-300, right)
        ratio = low + part / ratio
        ratio = tl.where(tl.abs(ratio) < 1e-300, 1e-300, ratio)
        step = right * ratio
        fraction = tl.where(going, fraction * step, fraction)
        going = going & (tl.abs(step - 1.0) > {LIMIT!r})
    upper = scale * fraction
    lower, upper = tl.where(by_series, lower, 1.0 - upper), tl.where(by_series, 1.0 - lower, upper)
    upper_there, lower_there = uniform_upper_gamma(tl.where(large, a, 400.0), tl.where(large, x, 400.0))
    lower, upper = tl.where(large, lower_there, lower), tl.where(large, upper_there, upper)
    all_lower = ((a == 0.0) & (x > 0.0)) | ((a > 0.0) & (a < float("inf")) & (x == float("inf")))
    all_lower = all_lower | ((a != a) & (x == float("inf")))
    all_upper = ((a != 0.0) & (x == 0.0)) | ((a == float("inf")) & (x != float("inf")))
    lower = tl.where(all_lower, 1.0, tl.where(all_upper, 0.0, lower))
    upper = tl.where(all_lower, 0.0, tl.where(all_upper, 1.0, upper))
    some = (plain | all_lower | all_upper) & ~((a < 0.0) | (x < 0.0))
    return tl.where(some, lower, float("nan")), tl.where(some, upper, float("nan"))
""",
    """
def lower_gamma(given, place):
    lower, upper = gamma_parts(given, place)
    return tl.cast(lower, place.dtype)
""",
    """
def upper_gamma(given, place):
    lower, upper = gamma_parts(given, place)
    return tl.cast(upper, place.dtype)
""",
)
TWO_ARGUMENTS = (*ZETA, *INCOMPLETE_GAMMA)
