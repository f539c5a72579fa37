"""Arc functions."""

from __future__ import annotations

from ferrite.codegen.coefficients.constants import HALF_PI, PI, Parts
from ferrite.codegen.coefficients.elementary import ASIN, ATAN
from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.text import (
    Value,
    bits,
    copysign,
    fabs,
    fma,
    maximum,
    minimum,
    polynomial,
    select,
    sqrt,
)


def beyond(parts: Parts, x: Value, rest: Value | float) -> Value:
    """A constant in parts, less x and less a rest that is small."""
    return parts[0] - (x - (parts[1] - rest))


def arc_sine_parts(a: Value) -> tuple[Value, Value, Value]:
    """Whether a is above one half, and two parts of an arc sine: then of the root of (1 - a) / 2, else of a."""
    large = a > 0.5
    halved = fma(a, -0.5, 0.5)
    root = sqrt(halved)
    s, z = select(large, root, a), select(large, halved, a * a)
    lost = select(large & (root > 0.0), fma(-root, root, halved) / (root + root), 0.0)
    return large, s, fma(s * z, polynomial(z, ASIN[a.element]), lost)


def asin(x: Value) -> Value:
    a = fabs(x)
    large, s, rest = arc_sine_parts(a)
    return copysign(select(large, beyond(HALF_PI[x.element], s + s, rest + rest), s + rest), x)


def acos(x: Value) -> Value:
    a = fabs(x)
    large, s, rest = arc_sine_parts(a)
    near_one = 2.0 * (s + rest)
    near_minus_one = beyond(PI[x.element], s + s, rest + rest)
    between = beyond(HALF_PI[x.element], copysign(s, x), copysign(rest, x))
    return select(large, select(x < 0.0, near_minus_one, near_one), between)


def arc_tangent_parts(t: Value) -> tuple[Value, Value]:
    """Two parts of the arc tangent of t, between zero and one."""
    z = t * t
    return t, t * z * polynomial(z, ATAN[t.element])


def atan(x: Value) -> Value:
    a = fabs(x)
    steep = a > 1.0
    t, rest = arc_tangent_parts(select(steep, 1.0, a) / select(steep, a, 1.0))
    return copysign(select(steep, beyond(HALF_PI[x.element], t, rest), t + rest), x)


def atan2(y: Value, x: Value) -> Value:
    above, along = fabs(y), fabs(x)
    quotient = minimum(above, along) / maximum(above, along)
    quotient = select(above.equals(along), 1.0, quotient)  # also where both are infinite
    quotient = select((above + along).equals(0.0), 0.0, quotient)  # beside a NaN, nothing is zero
    t, rest = arc_tangent_parts(quotient)
    steep = above > along
    first = select(steep, beyond(HALF_PI[x.element], t, rest), t + rest)
    # To the left: pi less that, and where that is a difference itself, in one step.
    high, low, _ = HALF_PI[x.element]
    turned = select(steep, high + (t + (rest + low)), beyond(PI[x.element], t, rest))
    return copysign(select(bits(x) < 0, turned, first), y)


FUNCTIONS = (
    MathFunction("asin", asin, f32=1.5, f64=1.5, method="polynomial; above one half by the root of (1 - x) / 2"),
    MathFunction("acos", acos, f32=1.5, f64=1.5, method="as asin"),
    MathFunction("atan", atan, f32=2.0, f64=2.0, method="polynomial of x or 1 / x"),
    MathFunction("atan2", atan2, f32=2.0, f64=2.0, arity=2, method="polynomial of the smaller over the larger"),
)
