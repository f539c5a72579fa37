"""The error function and its complement; their inverses are in `normal`."""

from __future__ import annotations

from ferrite.codegen.coefficients.elementary import ERF_LARGE, ERF_NEAR_ZERO, ERF_SMALL, ERFCX, ERFCX_WIDE
from ferrite.codegen.llvm.math.exp import exp_in_parts
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.text import Value, copysign, fabs, fma, minimum, polynomial, polynomial_in_halves, select

ERF_IS_ONE = {"float": 4.0, "double": 6.0}
ERFC_IS_ZERO = {"float": 10.06, "double": 27.3}


def scaled_erfc(a: Value) -> Value:
    """(1 + 2a) exp(a^2) erfc(a): all but constant, so that the rounding of its argument matters little."""
    if a.element == "float":
        return polynomial((a - 2.0) / (a + 2.0), ERFCX["float"])
    return polynomial((a - 4.0) / (a + 4.0), ERFCX_WIDE["double"])


def erfc_of_positive(a: Value) -> Value:
    a = minimum(a, ERFC_IS_ZERO[a.element])
    square = a * a
    near_one, first, second = exp_in_parts(-square, fma(-a, a, square))
    return near_one * scaled_erfc(a) / fma(a, 2.0, 1.0) * first * second


def erfc(x: Value) -> Value:
    a = fabs(x)
    # Where the result is close to one, many small errors are more than one of its last place.
    small = 1.0 - fma(a, polynomial(a * a, ERF_NEAR_ZERO[x.element]), a)
    result = select(a < 0.5, small, erfc_of_positive(a))
    return select(x < 0.0, 2.0 - result, result)


def erf(x: Value) -> Value:
    a = minimum(fabs(x), ERF_IS_ONE[x.element])
    small = fma(a, polynomial(a * a, ERF_SMALL[x.element]), a)
    if x.element == "float":
        large, border = 1.0 - polynomial_in_halves(a - 2.5625, ERF_LARGE["float"]), 1.125
    else:
        large, border = 1.0 - erfc_of_positive(a), 1.0
    return copysign(select(a < border, small, large), x)


FUNCTIONS = (
    MathFunction("erf", erf, f32=1.5, f64=1.5, method="two polynomials; f64: a polynomial, beyond 1 by erfc"),
    MathFunction("erfc", erfc, f32=4.0, f64=4.0, method="exp(-x^2) times a polynomial; near zero by that of erf"),
)
