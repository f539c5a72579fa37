"""Roots: the machine has them."""

from __future__ import annotations

from ferrite.codegen.llvm.math.function import MathFunction
from ferrite.codegen.llvm.math.text import Value, sqrt


def rsqrt(x: Value) -> Value:
    return 1.0 / sqrt(x)


FUNCTIONS = (
    MathFunction("sqrt", sqrt, f32=0.5, f64=0.5, method="the instruction"),
    MathFunction("rsqrt", rsqrt, f32=1.5, f64=1.5, method="one over the root, two roundings as in eager"),
)
