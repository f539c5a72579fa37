"""The type that torch converts operands to before it works on them.

Tensors with dimensions decide; tensors without and numbers only raise the kind: integer to float, float to complex.
"""

from __future__ import annotations

import functools

import torch

from ferrite.ir import Expr, Index
from ferrite.lower.value import Value

Operand = Value | Index | Expr | bool | int | float | complex
COMPLEX_OF = {torch.float16: torch.complex32, torch.float64: torch.complex128}


def common_type(*operands: Operand) -> torch.dtype:
    """What torch.result_type says of these operands."""
    groups: tuple[list[torch.dtype], list[torch.dtype], list[torch.dtype]] = ([], [], [])
    for operand in operands:
        if isinstance(operand, Value):
            groups[0 if operand.rank else 1].append(operand.dtype)
        else:
            groups[2].append(number_type(operand))
    result: torch.dtype | None = None
    for group in groups:
        result = raised(result, functools.reduce(promoted, group) if group else None)
    assert result is not None
    return result


def number_type(operand: object) -> torch.dtype:
    """What a Python number counts as: the default type of its kind."""
    match operand:
        case bool():
            return torch.bool
        case int() | Index():
            return torch.int64
        case float():
            return torch.get_default_dtype()
        case complex():
            return complex_of(torch.get_default_dtype())
        case Expr():
            return torch.get_default_dtype() if operand.dtype.is_floating_point else operand.dtype
    raise TypeError(f"no operand: {operand!r}")


@functools.cache  # asked of torch while it traces, this is an operator like any other, and slow
def promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return torch.promote_types(first, second)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    return COMPLEX_OF.get(dtype, torch.complex64)


def raised(first: torch.dtype | None, second: torch.dtype | None) -> torch.dtype | None:
    """The type that operands of two groups have together: the first decides, the second only raises its kind (whole
    numbers become floats, floats complex)."""
    if first is None or second is None:
        return first or second
    if first.is_complex:
        return first
    if first.is_floating_point:
        return complex_of(first) if second.is_complex else first
    if first is torch.bool or second.is_floating_point or second.is_complex:
        return promoted(first, second)
    return first
