"""Hyperbolic functions and their inverses."""

from __future__ import annotations

from ferrite.codegen.llvm.math_exp import exp_of_moderate
from ferrite.codegen.llvm.math_fits import TANH
from ferrite.codegen.llvm.math_function import Function
from ferrite.codegen.llvm.math_text import Value, copysign, fabs, fma, minimum, polynomial, select

TANH_IS_ONE = {"float": 9.02, "double": 19.1}


def tanh(x: Value) -> Value:
    a = minimum(fabs(x), TANH_IS_ONE[x.element])
    z = a * a
    small = fma(a * z, polynomial(z, TANH[x.element]), a)
    large = 1.0 - 2.0 / (exp_of_moderate(a + a) + 1.0)
    return copysign(select(a < 0.5625, small, large), x)


FUNCTIONS = (Function("tanh", tanh, f32=1.5, f64=1.5, method="a polynomial; beyond 0.56 by exp(2|x|) and one division"),)
