"""What bounds of indices say of conditions: comparisons that come out the same everywhere, and what follows."""

from __future__ import annotations

import math

import torch

from ferrite.ir import Const, Expr, Index, IndexValue, Masked, Op, const, number

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


def answer_of(comparison: Op) -> bool | None:
    difference = difference_of(comparison)
    if difference is None:
        return None
    low = -math.inf if difference.low is None else difference.low
    high = math.inf if difference.high is None else difference.high
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
