"""What is fitted for the vector math functions: each with its meaning, its interval and its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mpmath
from fit import Fit, Function, fit_polynomial, fit_quotient
from mpmath import mpf

DIGITS = {"float": 24, "double": 53}


@dataclass(frozen=True)
class Spec:
    meaning: str
    target: Function
    wanted: Mapping[str, tuple[float, float, int] | tuple[float, float, int, int]]  # interval and sizes, by type
    weight: Function | None = None  # one over the target unless told
    given: tuple[float, ...] = ()

    def fits(self) -> dict[str, Fit]:
        done = {}
        for element, (low, high, *sizes) in self.wanted.items():
            if len(sizes) == 1:
                done[element] = fit_polynomial(
                    self.target, low, high, sizes[0], DIGITS[element], self.weight, self.given
                )
            else:
                done[element] = fit_quotient(self.target, low, high, *sizes, DIGITS[element], self.weight)
        return done

    def range(self, element: str) -> str:
        return "[{:.6g}, {:.6g}]".format(*self.wanted[element][:2])


def both(low: float, high: float, size: int, wide_size: int) -> dict[str, tuple[float, float, int]]:
    return {"float": (low, high, size), "double": (low, high, wide_size)}


NEAR_ZERO = 1e-9  # where quotients that are 0/0 at zero are taken
HALF_LN2 = 0.34665
LOG_LOW, LOG_HIGH = 0.70710 - 1, 1.41422 - 1


def ratio(x: float, k: float) -> float:
    return (x - k) / (x + k)


def scaled_erfc(x: mpf) -> mpf:
    return (1 + 2 * x) * mpmath.exp(x * x) * mpmath.erfc(x)


def erfcinv_of_exp(s: mpf) -> mpf:
    """v / s where erfc(v) = exp(-s^2), by Newton's method on the logarithm."""
    v = s * mpf("0.9") if s > 1 else s / 2
    for _ in range(60):
        value = mpmath.erfc(v)
        step = (mpmath.log(value) + s * s) * value * mpmath.sqrt(mpmath.pi) / 2 * mpmath.exp(v * v)
        v += step
        if abs(step) < abs(v) * mpf(10) ** -50:
            break
    return v / s


def stirling_rest(x: mpf) -> mpf:
    start = (x - mpf("0.5")) * (mpmath.log(x) - 1) + (mpmath.log(2 * mpmath.pi) - 1) / 2
    return (mpmath.loggamma(x) - start) * x


def scaled_bessel(order: int, x: mpf) -> mpf:
    return mpmath.besseli(order, x) * mpmath.exp(-x) * mpmath.sqrt(x)


def scaled_bessel_k(order: int, x: mpf) -> mpf:
    return mpmath.besselk(order, x) * mpmath.exp(x) * mpmath.sqrt(x)


def regular_bessel_k(order: int, t: mpf) -> mpf:
    """What is left of K without its logarithm, over t = x^2 / 4; of K1, times x."""
    x = 2 * mpmath.sqrt(t)
    log = mpmath.log(x / 2)
    if order == 0:
        return mpmath.besselk(0, x) + log * mpmath.besseli(0, x)
    return x * (mpmath.besselk(1, x) - log * mpmath.besseli(1, x))


def airy_decay(w: mpf) -> mpf:
    """Ai(x) 2 sqrt(pi) x^(1/4) exp(z), over w = 1 / z, where z = 2/3 x^(3/2)."""
    z = 1 / w
    x = (1.5 * z) ** (mpf(2) / 3)
    return mpmath.airyai(x) * 2 * mpmath.sqrt(mpmath.pi) * x**0.25 * mpmath.exp(z)


def airy_wave(w: mpf, turn: int) -> mpf:
    """Below zero Ai(-x) is sqrt(1 / pi) x^(-1/4) (f sin(z + pi/4) - g cos(z + pi/4)): f, and g / w, over w = 1 / z."""
    z = 1 / w
    x = (1.5 * z) ** (mpf(2) / 3)
    scale = mpmath.sqrt(mpmath.pi) * x**0.25
    sine, cosine = mpmath.sin(z + mpmath.pi / 4), mpmath.cos(z + mpmath.pi / 4)
    first, second = mpmath.airyai(-x) * scale, mpmath.airybi(-x) * scale
    return first * sine + second * cosine if turn == 0 else (second * sine - first * cosine) / w


DIGAMMA_ZERO = mpmath.findroot(mpmath.digamma, mpf("1.46"))

ELEMENTARY: dict[str, Spec] = {
    "EXP": Spec("exp(r)", mpmath.exp, both(-HALF_LN2, HALF_LN2, 7, 12), given=(1.0, 1.0)),
    "EXP2": Spec("2^r", lambda r: mpf(2) ** r, both(-0.5001, 0.5001, 7, 12), given=(1.0,)),
    "EXPM1": Spec(
        "(exp(r) - 1 - r) / r^2",
        lambda r: (mpmath.expm1(r) - r) / r**2,
        both(-HALF_LN2, HALF_LN2, 5, 10),
        weight=lambda r: abs(r**2 / mpmath.expm1(r)),
        given=(0.5,),
    ),
    "LOG": Spec(
        "(log(1 + f) - f + f^2 / 2) / f^3",
        lambda f: (mpmath.log1p(f) - f + f**2 / 2) / f**3,
        {"float": (LOG_LOW, LOG_HIGH, 8)},
        weight=lambda f: abs(f**3 / mpmath.log1p(f)),
    ),
    "LOG_BY_QUOTIENT": Spec(
        "(log((1 + s) / (1 - s)) / s - 2) / z, over z = s^2",
        lambda z: 2 * (mpmath.atanh(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        {"double": (NEAR_ZERO, 0.029438, 7)},
        weight=lambda z: z / 2,
    ),
    "LOG_FOR_POWER": Spec(
        "as LOG_BY_QUOTIENT, for powers of floats computed in doubles",
        lambda z: 2 * (mpmath.atanh(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        {"double": (NEAR_ZERO, 0.029438, 4)},
        weight=lambda z: z / 2,
    ),
    "LOG_REST": Spec(
        "(log((1 + s) / (1 - s)) / s - 2 - 2/3 z) / z^2, over z = s^2",
        lambda z: 2 * (mpmath.atanh(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1 - z / 3) / z**2,
        {"double": (NEAR_ZERO, 0.029438, 8)},
        weight=lambda z: z**2 / 2,
    ),
    "SIN": Spec(
        "(sin(r) / r - 1) / z, over z = r^2",
        lambda z: (mpmath.sin(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        both(NEAR_ZERO, 0.7875**2, 3, 6),
        weight=lambda z: z * mpmath.sqrt(z) / mpmath.sin(mpmath.sqrt(z)),
    ),
    "COS": Spec(
        "(cos(r) - 1 + z / 2) / z^2, over z = r^2",
        lambda z: (mpmath.cos(mpmath.sqrt(z)) - 1 + z / 2) / z**2,
        both(NEAR_ZERO, 0.7875**2, 3, 6),
        weight=lambda z: z**2 / mpmath.cos(mpmath.sqrt(z)),
    ),
    "TAN": Spec(
        "tan(r) / r, over r^2",
        lambda z: mpmath.tan(mpmath.sqrt(z)) / mpmath.sqrt(z),
        {"float": (NEAR_ZERO, 0.7875**2, 3, 3), "double": (NEAR_ZERO, 0.7875**2, 4, 5)},
    ),
    "TANH": Spec(
        "(tanh(x) / x - 1) / z, over z = x^2",
        lambda z: (mpmath.tanh(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        both(NEAR_ZERO, 0.625**2, 5, 12),
        weight=lambda z: z * mpmath.sqrt(z) / mpmath.tanh(mpmath.sqrt(z)),
    ),
    "ERF_SMALL": Spec(
        "erf(x) / x - 1, over x^2",
        lambda z: mpmath.erf(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1,
        {"float": (NEAR_ZERO, 1.125**2, 7), "double": (NEAR_ZERO, 1.0, 13)},
        weight=lambda z: mpmath.sqrt(z) / mpmath.erf(mpmath.sqrt(z)),
    ),
    "ERF_NEAR_ZERO": Spec(
        "as ERF_SMALL, on a shorter interval",
        lambda z: mpmath.erf(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1,
        both(NEAR_ZERO, 0.25, 5, 9),
        weight=lambda z: mpmath.sqrt(z) / mpmath.erf(mpmath.sqrt(z)),
    ),
    "ERF_LARGE": Spec(
        "1 - erf(u + 2.5625)",
        lambda u: mpmath.erfc(u + mpf("2.5625")),
        {"float": (1.125 - 2.5625, 4 - 2.5625, 15)},
        weight=lambda u: mpf(1),
    ),
    "ERFCX": Spec(
        "(1 + 2 x) exp(x^2) erfc(x), over t = (x - 2) / (x + 2)",
        lambda t: scaled_erfc(2 * (1 + t) / (1 - t)),
        {"float": (-1, ratio(10.06, 2), 10)},
    ),
    "ERFCX_WIDE": Spec(
        "the same, over t = (x - 4) / (x + 4)",
        lambda t: scaled_erfc(4 * (1 + t) / (1 - t)),
        {"double": (-1, ratio(27.3, 4), 22)},
    ),
    "SINH": Spec(
        "(sinh(x) / x - 1) / z, over z = x^2",
        lambda z: (mpmath.sinh(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        both(NEAR_ZERO, 1, 4, 7),
        weight=lambda z: z * mpmath.sqrt(z) / mpmath.sinh(mpmath.sqrt(z)),
    ),
    "ASIN": Spec(
        "(asin(x) / x - 1) / z, over z = x^2",
        lambda z: (mpmath.asin(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        both(NEAR_ZERO, 0.25, 5, 12),
        weight=lambda z: z * mpmath.sqrt(z) / mpmath.asin(mpmath.sqrt(z)),
    ),
    "ATAN": Spec(
        "(atan(x) / x - 1) / z, over z = x^2",
        lambda z: (mpmath.atan(mpmath.sqrt(z)) / mpmath.sqrt(z) - 1) / z,
        both(NEAR_ZERO, 1, 10, 20),
        weight=lambda z: z * mpmath.sqrt(z) / mpmath.atan(mpmath.sqrt(z)),
    ),
}

SPECIAL: dict[str, Spec] = {
    "NORMAL_TAIL": Spec(
        "exp(x^2 / 2) erfc(x / sqrt(2)) / 2",
        lambda x: mpmath.exp(x * x / 2) * mpmath.erfc(x / mpmath.sqrt(2)) / 2,
        {"float": (0, 14.25, 5, 6)},
    ),
    "NORMAL_EXP": Spec("exp(-z / 2)", lambda z: mpmath.exp(-z / 2), {"float": (-0.6933, 0.6933, 6)}, given=(1.0,)),
    "ERFINV": Spec(
        "erfinv(x) / x, over x^2",
        lambda z: mpmath.erfinv(mpmath.sqrt(z)) / mpmath.sqrt(z),
        {"double": (NEAR_ZERO, 0.25, 6, 6)},
    ),
    "ERFCINV_1": Spec(
        "v / s where erfc(v) = exp(-s^2), over s - 0.825",
        lambda u: erfcinv_of_exp(u + mpf("0.825")),
        {"double": (0, 2.5 - 0.825, 9, 9)},
    ),
    "ERFCINV_2": Spec(
        "the same, over s - 2.5", lambda u: erfcinv_of_exp(u + mpf("2.5")), {"double": (0, 7 - 2.5, 8, 8)}
    ),
    "ERFCINV_3": Spec("the same, over s - 7", lambda u: erfcinv_of_exp(u + 7), {"double": (0, 27.4 - 7, 8, 8)}),
    "LGAMMA_1": Spec("lgamma(1 + u) / u", lambda u: mpmath.loggamma(1 + u) / u, {"double": (-0.5, 0.5, 8, 8)}),
    "LGAMMA_2": Spec("lgamma(2 + u) / u", lambda u: mpmath.loggamma(2 + u) / u, {"double": (-0.5, 1, 8, 8)}),
    "LGAMMA_LARGE": Spec(
        "x (lgamma(x) - (x - 1/2) (log(x) - 1) - (log(2 pi) - 1) / 2), over 1 / x^2",
        lambda w: stirling_rest(1 / mpmath.sqrt(w)),
        {"double": (NEAR_ZERO, 1 / 9, 11)},
        weight=lambda w: mpmath.sqrt(w) / mpmath.loggamma(1 / mpmath.sqrt(w)),
    ),
    "DIGAMMA_ROOT": Spec(
        "digamma(1 + u) / (1 + u - its root)",
        lambda u: mpmath.digamma(1 + u) / (1 + u - DIGAMMA_ZERO),
        {"double": (0, 1, 7, 7)},
    ),
    "DIGAMMA_LARGE": Spec(
        "x^2 (log(x) - 1 / (2 x) - digamma(x)), over 1 / x^2",
        lambda w: (-mpmath.log(w) / 2 - mpmath.sqrt(w) / 2 - mpmath.digamma(1 / mpmath.sqrt(w))) / w,
        {"double": (NEAR_ZERO, 1 / 9, 11)},
        weight=lambda w: w / mpmath.digamma(1 / mpmath.sqrt(w)),
    ),
    "I0_SMALL": Spec(
        "i0(x), over x^2 / 4", lambda t: mpmath.besseli(0, 2 * mpmath.sqrt(t)), {"double": (0, 16, 18)}, given=(1.0,)
    ),
    "I0_LARGE": Spec(
        "i0(x) exp(-x) sqrt(x), over 16 / x - 1",
        lambda t: scaled_bessel(0, 16 / (1 + t)),
        {"double": (-1 + 2e-5, 1, 23)},
    ),
    "I1_SMALL": Spec(
        "2 i1(x) / x, over x^2 / 4",
        lambda t: mpmath.besseli(1, 2 * mpmath.sqrt(t)) / mpmath.sqrt(t),
        {"double": (NEAR_ZERO, 16, 18)},
        given=(1.0,),
    ),
    "I1_LARGE": Spec(
        "i1(x) exp(-x) sqrt(x), over 16 / x - 1",
        lambda t: scaled_bessel(1, 16 / (1 + t)),
        {"double": (-1 + 2e-5, 1, 23)},
    ),
    "K0_SMALL": Spec(
        "k0(x) + log(x / 2) i0(x), over x^2 / 4",
        lambda t: regular_bessel_k(0, t),
        {"double": (NEAR_ZERO, 1, 12)},
        weight=lambda t: mpf(1),
    ),
    "K0_LARGE": Spec(
        "k0(x) exp(x) sqrt(x), over 4 / x - 1",
        lambda t: scaled_bessel_k(0, 4 / (1 + t)),
        {"double": (-1 + 2e-5, 1, 25)},
    ),
    "K1_SMALL": Spec(
        "x k1(x) - x log(x / 2) i1(x), over x^2 / 4",
        lambda t: regular_bessel_k(1, t),
        {"double": (NEAR_ZERO, 1, 12)},
        weight=lambda t: mpf(1),
    ),
    "K1_LARGE": Spec(
        "k1(x) exp(x) sqrt(x), over 4 / x - 1",
        lambda t: scaled_bessel_k(1, 4 / (1 + t)),
        {"double": (-1 + 2e-5, 1, 25)},
    ),
    "AIRY_MIDDLE": Spec("airy_ai(x)", mpmath.airyai, {"double": (-2, 2, 26)}, weight=lambda x: mpf(1)),
    "AIRY_DECAY": Spec(
        "airy_ai(x) 2 sqrt(pi) x^(1/4) exp(z), over 1 / z, where z = 2/3 x^(3/2)",
        airy_decay,
        {"double": (1e-4, 0.531, 8, 8)},
    ),
    "AIRY_SINE": Spec(
        "airy_ai(-x) sqrt(pi) x^(1/4) is f sin(z + pi/4) - g cos(z + pi/4): f, over 1 / z^2, where z = 2/3 x^(3/2)",
        lambda v: airy_wave(mpmath.sqrt(v), 0),
        {"double": (1e-8, 0.282, 8, 8)},
    ),
    "AIRY_COSINE": Spec(
        "the same: g z",
        lambda v: airy_wave(mpmath.sqrt(v), 1),
        {"double": (1e-8, 0.282, 8, 8)},
    ),
}
