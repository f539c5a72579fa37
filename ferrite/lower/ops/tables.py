"""Indices that are computed in floats, but follow from one loop variable: worked out beforehand, one by one.

Resampling computes places so. Where the numbers turn out to be i * k + c or i // k + c, that is what they are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import Axis, Cast, Const, Expr, Index, IndexValue, Number, Op, evaluate, number

MAX_TABLE_ENTRIES = 1 << 12
F32, F64, I64, B8 = torch.float32, torch.float64, torch.int64, torch.bool
TYPES = (F32, F64, I64, torch.int32, B8)

MEANINGS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floor": lambda a: float(math.floor(a)),
    "trunc": lambda a: float(math.trunc(a)),
    "minimum": min,
    "maximum": max,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "where": lambda condition, a, b: a if condition else b,
}


def worked_out(expr: Expr) -> Index | None:
    """An integer expression of one loop variable as an index, where its numbers have a plain form."""
    axes = [atom for atom in expr.atoms if isinstance(atom, Axis)]
    if expr.loads or len(axes) != 1 or len(expr.atoms) != 1 or not isinstance(axes[0].extent, Number):
        return None
    (item,) = axes
    count = axes[0].extent.value
    if not 1 < count <= MAX_TABLE_ENTRIES:
        return None
    try:
        values = [int(value_at(expr, item, place, {})) for place in range(count)]
    except (NotLowered, OverflowError, ValueError, ZeroDivisionError):
        return None
    return plain_form(values, item)


def plain_form(values: Sequence[int], table_axis: Axis) -> Index | None:
    first, step = values[0], values[1] - values[0]
    if all(value == first + step * place for place, value in enumerate(values)):
        return table_axis * step + first
    repeats = next(place for place, value in enumerate(values) if value != first)
    if all(value == first + place // repeats for place, value in enumerate(values)):
        return table_axis // number(repeats) + first
    return None


def value_at(expr: Expr, table_axis: Axis, place: int, computed: dict[Expr, Any]) -> Any:
    if expr not in computed:
        if expr.dtype not in TYPES:
            raise NotLowered(f"numbers of type {expr.dtype}")
        match expr:
            case Const():
                found = expr.value
            case IndexValue():
                found = evaluate(expr.index, {table_axis: place})
            case Cast():
                found = value_at(expr.arg, table_axis, place, computed)
            case Op() if expr.name in MEANINGS:
                found = MEANINGS[expr.name](*(value_at(part, table_axis, place, computed) for part in expr.operands))
            case _:
                raise NotLowered("an operator that is not worked out beforehand")
        computed[expr] = rounded(found, expr.dtype)
    return computed[expr]


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """A number as its type holds it. A result of one step in 64 bits, rounded again, is what 32 bits give."""
    if dtype is B8:
        return bool(value)
    if dtype in (F32, F64):
        return struct.unpack("<f", struct.pack("<f", value))[0] if dtype is F32 else float(value)
    whole, limits = math.trunc(value), torch.iinfo(dtype)
    if not limits.min <= whole <= limits.max:
        raise NotLowered(f"a number that {dtype} does not hold")
    return whole
