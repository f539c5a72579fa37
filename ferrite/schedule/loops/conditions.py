"""What bounds of indices say of conditions: comparisons that come out the same everywhere, and what follows."""

from __future__ import annotations

import math

import torch

from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Const,
    Expr,
    FloorDiv,
    Index,
    IndexValue,
    Masked,
    Number,
    Op,
    Sum,
    add,
    const,
    number,
)

MAX_STEPS = 4  # by which an index is made one that has bounds
# A comparison of d with 0, as `d + shift < 0` or its opposite: it changes where that does.
SHIFTS = {"lt": (0,), "ge": (0,), "le": (-1,), "gt": (-1,), "eq": (0, -1), "ne": (0, -1)}


def difference_of(comparison: Op) -> Index | None:
    left, right = map(as_index, comparison.operands)
    return None if left is None or right is None else left - right


def as_index(value: Expr) -> Index | None:
    if value.dtype is not torch.int64:
        return None
    if isinstance(value, IndexValue):
        return value.index
    return number(value.value) if isinstance(value, Const) and isinstance(value.value, int) else None


def known_value(item: Expr) -> Expr:
    if isinstance(item, Masked):
        return chosen(item.mask, item.value, item.other) or item
    if not isinstance(item, Op):
        return item
    match item.name:
        case "where":
            return chosen(*item.operands) or item
        case "logical_not" if isinstance(item.operands[0], Const):
            return const(not item.operands[0].value, torch.bool)
        case "logical_and" | "logical_or":
            return folded_logic(item)
        case name if name in SHIFTS:
            answer = answer_of(item)
            return item if answer is None else const(answer, torch.bool)
    return item


def chosen(condition: Expr, yes: Expr, no: Expr) -> Expr | None:
    if not isinstance(condition, Const):
        return None
    return yes if condition.value else no


def folded_logic(item: Op) -> Expr:
    """`and` and `or` of truth values, where one is known."""
    absorbing = item.name == "logical_or"
    for one, other in (item.operands, item.operands[::-1]):
        if isinstance(one, Const) and one.dtype is torch.bool:
            if bool(one.value) is absorbing:
                return const(absorbing, torch.bool)
            if other.dtype is torch.bool:
                return other
    return item


def bound_of(index: Index, up: bool) -> float:
    """What an index is no less than, or no more than, inside of the loops that it counts: `2*i - s0` is less than zero
    where i stops at `(s0 + 1)//2`."""
    for _ in range(MAX_STEPS):
        bound = index.high if up else index.low
        if bound is not None:
            return bound
        index, before = add(towards(*term, up) for term in terms_of(index)), index
        if index is before:
            break
    return math.inf if up else -math.inf


def terms_of(index: Index) -> list[tuple[Index, int]]:
    return [*index.terms, (ONE, index.constant)] if isinstance(index, Sum) else [(index, 1)]


def towards(item: Index, factor: int, up: bool) -> tuple[Index, int]:
    """A term, times its factor, as one that is no less, or no more: an axis as its end, a quotient as what it is of."""
    grows = (factor > 0) == up
    if isinstance(item, Axis):
        return (item.extent - 1, factor) if grows else (ZERO, factor)
    if isinstance(item, FloorDiv) and isinstance(item.bottom, Number) and factor % item.bottom.value == 0:
        return (item.top if grows else item.top - (item.bottom.value - 1)), factor // item.bottom.value
    return item, factor


def answer_of(comparison: Op) -> bool | None:
    difference = difference_of(comparison)
    if difference is None:
        return None
    low, high = (bound_of(difference, up) for up in (False, True))
    match comparison.name:
        case "lt" | "ge":
            answer = True if high < 0 else False if low >= 0 else None
        case "le" | "gt":
            answer = True if high <= 0 else False if low > 0 else None
        case _:
            answer = False if low > 0 or high < 0 else True if low == high else None
    if answer is None:
        return None
    return answer if comparison.name in ("lt", "le", "eq") else not answer
