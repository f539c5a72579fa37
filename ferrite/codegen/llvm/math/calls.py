"""Calls of math functions: our own vector functions where there is one, else libm's, lane by lane."""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.emission import Emission
from ferrite.codegen.llvm.math import table as vector_math
from ferrite.codegen.llvm.number_table import with_numbers_in_memory
from ferrite.codegen.llvm.operators import ROWS, TAKES, is_float, words
from ferrite.codegen.llvm.types import vector

# Functions of libm that are as exact as torch's: those torch itself calls, or ones as good.
LIBM = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1"),
    *("fmod", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow", "sin", "sinh", "tan", "tanh"),
)
OPERATORS = sorted({*LIBM, *(name for name, _ in vector_math.MATH)})


def has_function(name: str, dtype: torch.dtype) -> bool:
    return is_float(dtype) and ((name, dtype) in vector_math.MATH or name in LIBM)


def function(e: Emission, name: str, dtype: torch.dtype, lanes: int, *operands: str) -> str:
    element = words(e, dtype, lanes).element
    if (name, dtype) in vector_math.MATH:
        symbol = vector_math.function_name(name, dtype, lanes)
        if symbol not in e.module.helpers:
            text = vector_math.function_text(name, dtype, lanes)
            e.module.helpers[symbol] = (
                with_numbers_in_memory(e.module.numbers, text) if e.processor.destroys_addend else text
            )
            for line in sorted(vector_math.declarations([(name, dtype, lanes)])):
                e.declare(line)
        type_ = vector(element, lanes)
        given = ", ".join(f"{type_} {operand}" for operand in operands)
        return e.op(f"call {type_} {symbol}({given})", *operands)
    called = name + ("f" if element == "float" else "")
    e.declare(f"declare {element} @{called}({', '.join([element] * len(operands))})")
    found = []
    for lane in range(lanes):
        scalars = [e.lane(operand, element, lanes, lane) for operand in operands]
        found.append(e.op(f"call {element} @{called}({', '.join(f'{element} {item}' for item in scalars)})", *scalars))
    return e.gathered(found, element)


def _row(name: str) -> None:
    def make(e: Emission, dtype: torch.dtype, lanes: int, *operands: str) -> str:
        return function(e, name, dtype, lanes, *operands)

    ROWS[name], TAKES[name] = make, lambda dtype: has_function(name, dtype)


for _name in OPERATORS:
    if _name not in ROWS:
        _row(_name)
