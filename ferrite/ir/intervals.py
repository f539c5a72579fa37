"""Between which numbers a scalar expression lies, as far as its form tells.

Positions that are computed with (the places of an interpolation: `(i + 0.5) * 0.5 - 0.5`, cut at zero, without its
fraction) are known to be inside a tensor, so that nothing has to be checked when the program runs.
"""

from __future__ import annotations

import math
import weakref

import torch

from ferrite.ir.expr import Cast, Const, Data, Expr, IndexValue, Masked, Op, nodes_of
from ferrite.ir.types import is_integer

Number = int | float
Interval = tuple[Number, Number]  # both ends belong to it; no NaN lies in it
MAX_EXACT_INTEGER = 1 << 53  # whole numbers beyond are not computed with here

_intervals: weakref.WeakKeyDictionary[Expr, Interval | None] = weakref.WeakKeyDictionary()


def interval(expr: Expr) -> Interval | None:
    """None where nothing is known."""
    for item in nodes_of(expr, leaving_out=_intervals):
        _intervals[item] = _rounded(_made(item), item.dtype)
    return _intervals[expr]


def is_below_extent(atom: Data) -> bool:
    """Whether the form of a value that is an index tells that it is none outside, so that nothing need be compared."""
    found = interval(atom.value)
    return found is not None and atom.extent.low is not None and found[0] >= 0 and found[1] < atom.extent.low


def _made(item: Expr) -> Interval | None:
    match item:
        case Const(value=value) if isinstance(value, int | float) and math.isfinite(value):
            return value, value
        case IndexValue(index=index) if index.low is not None and index.high is not None:
            return index.low, index.high
        case Cast(arg=arg) if (found := _intervals[arg]) is not None:
            return _converted(found, item.dtype)
        case Masked():
            return _either(_intervals[item.value], _intervals[item.other])
        case Op(name="where"):
            return _either(_intervals[item.operands[1]], _intervals[item.operands[2]])
        case Op():
            parts = [_intervals[operand] for operand in item.operands]
            if all(part is not None for part in parts):
                return _operator(item.name, [part for part in parts if part is not None])
    return None


def _either(one: Interval | None, other: Interval | None) -> Interval | None:
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))


def _converted(found: Interval, dtype: torch.dtype) -> Interval | None:
    if dtype is torch.bool or not (dtype.is_floating_point or is_integer(dtype)):
        return None
    if dtype.is_floating_point:
        return found
    info = torch.iinfo(dtype)
    low, high = math.trunc(found[0]), math.trunc(found[1])
    return (low, high) if info.min <= low and high <= info.max else None


def _operator(name: str, parts: list[Interval]) -> Interval | None:
    low, high = parts[0]
    match name, parts[1:]:
        case "neg", []:
            return -high, -low
        case "floor", []:
            return math.floor(low), math.floor(high)
        case "add", [(least, most)]:
            return low + least, high + most
        case "sub", [(least, most)]:
            return low - most, high - least
        case "mul", [(least, most)]:
            ends = [one * other for one in (low, high) for other in (least, most)]
            return min(ends), max(ends)
        case "maximum", [(least, most)]:
            return max(low, least), max(high, most)
        case "minimum", [(least, most)]:
            return min(low, least), min(high, most)
    return None


def _rounded(found: Interval | None, dtype: torch.dtype) -> Interval | None:
    """What arithmetic in a type can make of it."""
    if found is None or not all(abs(end) < MAX_EXACT_INTEGER for end in found):
        return None
    low, high = found
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return low - abs(low) * info.eps - info.tiny, high + abs(high) * info.eps + info.tiny
    if not is_integer(dtype) or dtype is torch.bool:
        return None
    limits = torch.iinfo(dtype)
    return found if limits.min <= low and high <= limits.max else None
