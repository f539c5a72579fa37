"""Every second element, and the one after it: both from one load of all of them.

    even = tl.load(p + 2*i)                even, odd = tl.split(tl.reshape(tl.load(p + j), [.., 32, 2]))
    odd = tl.load(p + 2*i + 1)       =>    where j goes through twice as many places

Windows that move by two load so: element by element, since neighbouring lanes are not side by side. All of a line is
loaded as vectors. Only where both are loaded under the same conditions: what nobody asks for may lie outside of the
memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferrite.ir import (
    Axis,
    Expr,
    Index,
    IndexValue,
    Load,
    Masked,
    Op,
    Sum,
    data_of,
    indices_of,
    number,
    substitute,
)
from ferrite.ir.kernel import Let, Statement, Store

Condition = frozenset[tuple[Expr, Expr]]  # what holds around a load, each with what there is elsewhere


@dataclass(frozen=True)
class Pair:
    """The first of two elements side by side, and which of them one is."""

    even: Load
    place: int
    end: Index  # of places, counted along the lanes


def pairs_in(body: Iterable[Statement], lanes: Axis) -> dict[Load, Pair]:
    """Loads whose places are even and move by two along an axis, and those of the elements behind, where they are made
    under the same conditions."""
    conditions: dict[Load, set[Condition]] = {}
    for statement in body:
        if isinstance(statement, Let | Store):
            collect(statement.value, frozenset(), conditions, set())
    found: dict[Load, Pair] = {}
    for load in conditions:
        (place,) = load.coordinates if len(load.coordinates) == 1 else (None,)
        if place is None or data_of(place) or not is_even(place, lanes):
            continue
        odd = Load.intern(load.buffer, (place + 1,), load.dtype)
        if odd not in conditions or len(conditions[load]) != 1 or len(conditions[odd]) != 1:
            continue
        (mine,), (other,) = conditions[load], conditions[odd]
        more = other - mine
        ends = [end_of(condition, lanes) for condition, _elsewhere in more]
        if mine <= other and len(more) < 2 and None not in ends:
            end = ends[0] if ends else lanes.extent * 2
            assert end is not None
            found |= {load: Pair(load, 0, end), odd: Pair(load, 1, end)}
    return found


def end_of(condition: Expr, lanes: Axis) -> Index | None:
    """Where all places end, two for each lane but the last, which may have one, if a condition says whether it has: of
    a length n, there are (n + 1)//2 even places."""
    if not isinstance(condition, Op) or condition.name != "lt":
        return None
    left, right = condition.operands
    if not isinstance(left, IndexValue) or not isinstance(right, IndexValue) or left.index is not lanes * 2 + 1:
        return None
    return right.index if lanes.extent is (right.index + 1) // 2 else None


def is_even(place: Index, lanes: Axis) -> bool:
    """As far as a number says: whether rows begin at even places is another matter."""
    step = substitute(place, {lanes: lanes + 1}) - place
    constant = place.constant if isinstance(place, Sum) else 0
    return step is number(2) and constant % 2 == 0


def collect(
    item: Expr, around: Condition, conditions: dict[Load, set[Condition]], seen: set[tuple[Expr, Condition]]
) -> None:
    waiting = [(item, around)]
    while waiting:
        item, around = waiting.pop()
        if (item, around) in seen or not item.loads:
            continue
        seen.add((item, around))
        if isinstance(item, Load):
            conditions.setdefault(item, set()).add(around)
        if isinstance(item, Masked):
            inner = around | {(each, item.other) for each in parts_of(item.mask)}
            waiting += [(item.mask, around), (item.other, around), (item.value, inner)]
            continue
        waiting += [(part, around) for part in item.args]
        waiting += [(value, around) for index in indices_of(item) for value in data_of(index)]


def parts_of(condition: Expr) -> list[Expr]:
    """All that has to hold for a condition."""
    if isinstance(condition, Op) and condition.name == "logical_and":
        return [part for each in condition.operands for part in parts_of(each)]
    return [condition]
