"""Sine, cosine, tangent.

From the argument its nearest multiple of pi / 2 is taken away in three parts; fma makes the first exact as long as
the multiple is a small number, and what the second loses is kept. Beyond, libm answers, lane by lane.
"""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import HALF_PI, PI
from ferrite.codegen.coefficients.elementary import COS, SIN, TAN
from ferrite.codegen.llvm.math.exp import shifter
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.rare import rare_by_libm
from ferrite.codegen.llvm.math.text import Value, bits, fabs, fma, from_bits, polynomial, select

# The multiple is found to within a fraction of 2^-7 (2^-20 in f64): the polynomials reach a little beyond its half.
HUGE = {"float": 2.0**16, "double": 2.0**30}
WIDTH = {"float": 32, "double": 64}


def with_sign(magnitude: Value, sign: Value) -> Value:
    """Negated where the integer `sign` is negative."""
    mask = sign & -(1 << (WIDTH[magnitude.element] - 1))
    return from_bits(bits(magnitude) ^ mask)


def bit_as_sign(shifted: Value, place: int) -> Value:
    """An integer that is negative where this bit of a sum with `shifter` is set."""
    return bits(shifted) << (WIDTH[shifted.element] - 1 - place)


def quarter_turns(a: Value, bias: int) -> tuple[Value, Value, Value]:
    """How often pi / 2 goes into a, plus `bias`, in the low bits of the first result; what remains, in two parts."""
    start = shifter(a.element, bias)
    shifted = fma(a, 2 / PI["double"][0], start)
    n, (first, second, third) = shifted - start, HALF_PI[a.element]
    exact = fma(n, -first, a)
    product = n * second
    r = exact - product
    lost = ((exact - r) - product) - fma(n, second, -product)
    return shifted, r, fma(n, -third, lost)


def sine_of_turned(shifted: Value, r: Value, lost: Value) -> Value:
    """sin(n pi / 2 + r): the sine or the cosine of r, or their negatives."""
    z = r * r
    sine = r + fma(r * z, polynomial(z, SIN[r.element]), lost)
    cosine = fma(z, fma(z, polynomial(z, COS[r.element]), -0.5), 1.0)
    return with_sign(select(bit_as_sign(shifted, 0) < 0, cosine, sine), bit_as_sign(shifted, 1))


def sin(x: Value) -> Value:
    a = fabs(x)
    result = with_sign(sine_of_turned(*quarter_turns(a, 0)), bits(x))
    return rare_by_libm(a >= HUGE[x.element], result, "sin", x)


def cos(x: Value) -> Value:
    a = fabs(x)
    return rare_by_libm(a >= HUGE[x.element], sine_of_turned(*quarter_turns(a, 1)), "cos", x)


def tan(x: Value) -> Value:
    """A quotient of polynomials, turned upside down at odd multiples of pi / 2."""
    a, (above, under) = fabs(x), TAN[x.element]
    shifted, r, lost = quarter_turns(a, 0)
    z = r * r
    # The slope of the quotient is its square plus one, shared out over both its parts.
    cosine = 1.0 + fma(z, polynomial(z, under[1:]), -(lost * r))
    sine = r + fma(r * z, polynomial(z, above[1:]), lost * cosine)
    odd = bit_as_sign(shifted, 0)
    result = select(odd < 0, cosine, sine) / select(odd < 0, sine, cosine)
    return rare_by_libm(a >= HUGE[x.element], with_sign(result, odd ^ bits(x)), "tan", x)


FUNCTIONS = (
    MathFunction(
        "sin", sin, f32=1.5, f64=1.5, method="polynomials after reduction by pi / 2; libm beyond 2^16 (f64: 2^30)"
    ),
    MathFunction("cos", cos, f32=1.5, f64=1.5, method="as sin, a quarter turn on"),
    MathFunction("tan", tan, f32=3.0, f64=3.0, method="quotient of polynomials; libm beyond 2^16 (f64: 2^30)"),
)
