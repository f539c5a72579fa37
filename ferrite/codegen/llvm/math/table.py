"""Vector math functions for the CPU: their names, how exact they are, and their LLVM text.

>>> function_name("exp", torch.float32, 4), MATH["exp", torch.float32].ulps
('@ferrite_exp_f32_v4', 1.0)
>>> print(function_text("sqrt", torch.float32, 4))
define internal <4 x float> @ferrite_sqrt_f32_v4(<4 x float> %x) alwaysinline nounwind {
entry:
  %v0 = call <4 x float> @llvm.sqrt.v4f32(<4 x float> %x)
  ret <4 x float> %v0
}
<BLANKLINE>
>>> sorted(declarations([("sqrt", torch.float32, 4)]))
['declare <4 x float> @llvm.sqrt.v4f32(<4 x float>)']

A function takes and gives vectors of `lanes` elements, or scalars where lanes is 1, and has the same bits for every
count of lanes. It calls intrinsics, functions of libm for rare arguments, and helpers that its own text brings along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ferrite.codegen.llvm.math import bessel as math_bessel
from ferrite.codegen.llvm.math import division as math_division
from ferrite.codegen.llvm.math import error_function as math_error_function
from ferrite.codegen.llvm.math import exp as math_exp
from ferrite.codegen.llvm.math import gamma as math_gamma
from ferrite.codegen.llvm.math import hyperbolic as math_hyperbolic
from ferrite.codegen.llvm.math import inverse_trig as math_inverse_trig
from ferrite.codegen.llvm.math import log as math_log
from ferrite.codegen.llvm.math import normal as math_normal
from ferrite.codegen.llvm.math import power as math_power
from ferrite.codegen.llvm.math import root as math_root
from ferrite.codegen.llvm.math import trig as math_trig
from ferrite.codegen.llvm.math.function import MathFunction, symbol, write
from ferrite.ir import short

TYPES = (torch.float32, torch.float64)
_FAMILIES = (
    math_exp,
    math_log,
    math_power,
    math_root,
    math_division,
    math_trig,
    math_inverse_trig,
    math_hyperbolic,
    math_error_function,
    math_normal,
    math_gamma,
    math_bessel,
)
FUNCTIONS: dict[str, MathFunction] = {function.name: function for family in _FAMILIES for function in family.FUNCTIONS}


@dataclass(frozen=True)
class Accuracy:
    """The greatest distance from the exact result, in units of its last place or of the last place of `floor`."""

    ulps: float
    floor: float
    note: str


MATH: dict[tuple[str, torch.dtype], Accuracy] = {
    (name, dtype): Accuracy(
        function.bound(short(dtype)), function.floor if dtype is torch.float64 else 0.0, function.method
    )
    for name, function in FUNCTIONS.items()
    for dtype in TYPES
}


def function_name(name: str, dtype: torch.dtype, lanes: int) -> str:
    return symbol(name, short(dtype), lanes)


def function_text(name: str, dtype: torch.dtype, lanes: int) -> str:
    return write(FUNCTIONS[name], short(dtype), lanes).definition


def declarations(used: Iterable[tuple[str, torch.dtype, int]]) -> set[str]:
    """The `declare` lines that the texts of these functions (name, type, lanes) need."""
    lines: set[str] = set()
    for name, dtype, lanes in used:
        lines |= write(FUNCTIONS[name], short(dtype), lanes).declares
    return lines
