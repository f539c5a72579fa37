"""What reductions accumulate: how a state begins, what state a value is, how two states combine. Written as
expressions, so that the interpreter and every code generator mean the same.

Parameters of `lift` are the values; those of `combine` are the left state, then the right one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ferrite.ir.expr import Const, Expr, Param, const, op
from ferrite.ir.types import is_integer

Types = tuple[torch.dtype, ...]
State = tuple[Expr, ...]


@dataclass(frozen=True)
class StateKind:
    """`takes`: how many values make a state; `gives`: how many parts it has. `begin` may be None: it needs a value.
    `in_order`: a shorter `combine` of a state that has a value with the next, right where places come in their order.
    `take`: a shorter `combine` of a state with one value, which stands after the state's parts."""

    name: str
    takes: int
    gives: int
    begin: Callable[[Types], State]
    lift: Callable[[Types], State]
    combine: Callable[[Types], State]
    in_order: Callable[[Types], State] | None = None
    take: Callable[[Types], State] | None = None


def params(dtypes: Types, start: int = 0) -> list[Expr]:
    return [Param.intern(start + place, dtype) for place, dtype in enumerate(dtypes)]


def compare(name: str, left: Expr, right: Expr) -> Expr:
    return op(name, left, right, dtype=torch.bool)


def either(*conditions: Expr) -> Expr:
    return functools.reduce(lambda left, right: op("logical_or", left, right), conditions)


def both(*conditions: Expr) -> Expr:
    return functools.reduce(lambda left, right: op("logical_and", left, right), conditions)


def choose(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return op("where", condition, yes, no, dtype=yes.dtype)


def lowest(dtype: torch.dtype, largest: bool = False) -> Const:
    """The least value of a type, infinity included; or the greatest."""
    if dtype is torch.bool:
        return const(largest, dtype)
    if is_integer(dtype):
        info = torch.iinfo(dtype)
        return const(info.max if largest else info.min, dtype)
    return const(float("inf") if largest else float("-inf"), dtype)


# --- kinds ------------------------------------------------------------------------------------------------------------


def _with_operator(kind: str, operator: str, begin: Callable[[torch.dtype], Const]) -> StateKind:
    def combine(dtypes: Types) -> State:
        return (op(operator, *params(dtypes * 2)),)

    return StateKind(kind, 1, 1, lambda dtypes: (begin(dtypes[0]),), lambda dtypes: tuple(params(dtypes)), combine)


def _extreme_at(kind: str, better: str, largest: bool, last_nan: bool = False) -> StateKind:
    """Value and place: the better value, NaN before numbers, the smallest place among equals; of NaN the first, too, or
    the last."""

    def begin(dtypes: Types) -> State:
        return lowest(dtypes[0], not largest), lowest(dtypes[1], True)

    def combine(dtypes: Types) -> State:
        value, place, other, there = params(dtypes * 2)
        wins, ties = compare(better, other, value), compare("eq", other, value)
        takes = either(wins, both(ties, compare("lt", there, place)))
        if dtypes[0].is_floating_point:
            nan, other_nan = (op("isnan", item, dtype=torch.bool) for item in (value, other))
            closer = compare("gt" if last_nan else "lt", there, place)
            takes = either(takes, both(other_nan, either(op("logical_not", nan), closer)))
        return choose(takes, other, value), choose(takes, there, place)

    def in_order(dtypes: Types) -> State:
        value, place, other, there = params(dtypes * 2)
        takes = compare(better, other, value)
        if dtypes[0].is_floating_point:
            other_nan = op("isnan", other, dtype=torch.bool)
            first = op("logical_not", op("isnan", value, dtype=torch.bool))
            takes = either(takes, other_nan if last_nan else both(other_nan, first))
        return choose(takes, other, value), choose(takes, there, place)

    return StateKind(kind, 2, 2, begin, lambda dtypes: tuple(params(dtypes)), combine, in_order)


def _combined_welford(dtypes: Types) -> State:
    mean, squares, count, other_mean, other_squares, other_count = params(dtypes * 2)
    total, zero = op("add", count, other_count), const(0.0, dtypes[2])
    share = choose(compare("eq", total, zero), zero, op("div", other_count, total))
    delta = op("sub", other_mean, mean)
    moved = op("add", mean, op("mul", delta, share))
    apart = op("mul", op("mul", delta, delta), op("mul", count, share))
    return moved, op("add", op("add", squares, other_squares), apart), total


def _combined_softmax(dtypes: Types) -> State:
    """Scaled to the greater of both. Where that is +inf the sum is NaN, as eager's is: inf - inf."""
    most, total, other_most, other_total = params(dtypes * 2)
    greatest = op("maximum", most, other_most)
    infinite = compare("eq", greatest, lowest(dtypes[0], True))
    at_top = choose(infinite, const(float("nan"), dtypes[0]), const(1.0, dtypes[0]))

    def scaled(sum_: Expr, top: Expr) -> Expr:
        scale = choose(compare("eq", top, greatest), at_top, op("exp", op("sub", top, greatest)))
        return op("mul", sum_, scale)

    return greatest, op("add", scaled(total, most), scaled(other_total, other_most))


def _softmax_take(dtypes: Types) -> State:
    """With one exponential: of the distance between the greatest so far and the value."""
    most, total, value = *params(dtypes), Param.intern(2, dtypes[0])
    one, infinity = const(1.0, dtypes[1]), lowest(dtypes[0], True)
    greatest = op("maximum", most, value)
    away = op("exp", op("neg", op("abs", op("sub", value, most))))
    scale = choose(compare("eq", value, most), one, away)
    grown = choose(compare("gt", value, most), op("add", op("mul", total, scale), one), op("add", total, scale))
    return greatest, choose(compare("eq", greatest, infinity), const(float("nan"), dtypes[1]), grown)


def _welford_take(dtypes: Types) -> State:
    mean, squares, count, value = *params(dtypes), Param.intern(3, dtypes[0])
    total = op("add", count, const(1.0, dtypes[2]))
    delta = op("sub", value, mean)
    moved = op("add", mean, op("div", delta, total))
    return moved, op("add", squares, op("mul", delta, op("sub", value, moved))), total


def _single(dtypes: Types, *rest: float) -> State:
    """The state of one value."""
    return (Param.intern(0, dtypes[0]), *(const(value, dtype) for value, dtype in zip(rest, dtypes[1:], strict=True)))


STATES = {
    row.name: row
    for row in (
        _with_operator("sum", "add", lambda dtype: const(0, dtype)),
        _with_operator("prod", "mul", lambda dtype: const(1, dtype)),
        _with_operator("amax", "maximum", lowest),
        _with_operator("amin", "minimum", lambda dtype: lowest(dtype, True)),
        _with_operator("any", "logical_or", lambda dtype: const(False, dtype)),
        _with_operator("all", "logical_and", lambda dtype: const(True, dtype)),
        _with_operator("xor", "bitwise_xor", lambda dtype: const(0, dtype)),
        _extreme_at("argmax", "gt", True),
        _extreme_at("argmin", "lt", False),
        _extreme_at("argmax_of_window", "gt", True, last_nan=True),
        StateKind(
            "welford",
            1,
            3,
            lambda dtypes: tuple(const(0.0, dtype) for dtype in dtypes),
            lambda dtypes: _single(dtypes, 0.0, 1.0),
            _combined_welford,
            take=_welford_take,
        ),
        StateKind(
            "softmax",
            1,
            2,
            lambda dtypes: (lowest(dtypes[0]), const(0.0, dtypes[1])),
            lambda dtypes: _single(dtypes, 1.0),
            _combined_softmax,
            take=_softmax_take,
        ),
    )
}
