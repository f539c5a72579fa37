"""Loops parted where a condition on their axis changes, so that nothing is asked at every element.

    for i in vector(66):                        for i in vector(1):  y[i] = 0
        y[i] = masked(0 <= i - 1 < 64,    =>    for i in vector(64): y[i + 1] = x[i]
                      x[i - 1], 0)              for i in vector(1):  y[i + 65] = 0

So paddings, writes into slices and mirrored edges are plain copies but at their edges. Conditions that depend on other
axes too are left: they are the same for a whole vector, or have no place at which they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ferrite.ir.expr import Const, Expr, IndexValue, Masked, Op, const, rewrite_nodes
from ferrite.ir.index import Axis, Index, Max, Min, Number, Product, Sum, axis, number, substitute
from ferrite.ir.kernel import Accumulate, Let, Loop, Statement, Store, When, nodes_in
from ferrite.ir.questions import indices_of
from ferrite.schedule.loops import Body, replaced, vector_loop
from ferrite.schedule.machine import Machine

MOST_PIECES = 6
MOST_STATEMENTS = 64  # of a body that is written out once for every piece

# A comparison of d with 0, as `d + shift < 0` or its opposite: it changes where that does.
SHIFTS = {"lt": (0,), "ge": (0,), "le": (-1,), "gt": (-1,), "eq": (0, -1), "ne": (0, -1)}


def parted(body: Body, machine: Machine) -> Body:
    """The statements, with loops of vectors parted where that decides conditions."""
    found: list[Statement] = []
    for statement in body:
        if isinstance(statement, Loop) and statement.kind == "vector" and is_plain(statement):
            found += pieces_of(statement, machine)
        elif isinstance(statement, Loop | Accumulate | When):
            found.append(replace(statement, body=parted(statement.body, machine)))
        else:
            found.append(statement)
    return tuple(found)


def is_plain(loop: Loop) -> bool:
    if not isinstance(loop.axis.extent, Number) or len(loop.body) > MOST_STATEMENTS:
        return False
    return all(isinstance(statement, Let | Store) for statement in loop.body)


def pieces_of(loop: Loop, machine: Machine) -> list[Statement]:
    pieces = [(loop.axis, loop.body)]
    place = 0
    while place < len(pieces):
        item, body = pieces[place]
        cut = next(changes(item, body), None)
        if cut is None:
            place += 1
            continue
        if len(pieces) == MOST_PIECES:
            return [loop]
        pieces[place : place + 1] = [piece(item, body, 0, cut), piece(item, body, cut, known_extent(item))]
    if len(pieces) == 1:
        return [loop]
    return [vector_loop(item, body, machine) for item, body in pieces]


def piece(item: Axis, body: Body, start: int, end: int) -> tuple[Axis, Body]:
    """The statements for a part of the range, with what is now known decided."""
    part = axis(item.name, end - start)
    return part, tuple(decided(statement) for statement in replaced(body, {item: part + start}))


def known_extent(item: Axis) -> int:
    assert isinstance(item.extent, Number)
    return item.extent.value


# --- where conditions change ------------------------------------------------------------------------------------------


def changes(item: Axis, body: Body) -> Iterator[int]:
    """Places inside the range at which something changes that loads, or what is loaded, depend on."""
    for statement in body:
        for node in nodes_in(statement):
            if isinstance(node, Masked):
                for part in conditions(node.mask):
                    yield from change_of_comparison(part, item)
            for index in indices_of(node):
                yield from changes_in(index, item)
        if isinstance(statement, Store):
            for index in statement.coordinates:
                yield from changes_in(index, item)


def conditions(mask: Expr) -> Iterator[Op]:
    """The comparisons that a condition is made of."""
    if isinstance(mask, Op):
        if mask.name in ("logical_and", "logical_or", "logical_not"):
            for operand in mask.operands:
                yield from conditions(operand)
        elif mask.name in SHIFTS:
            yield mask


def change_of_comparison(comparison: Op, item: Axis) -> Iterator[int]:
    difference = difference_of(comparison)
    if difference is not None:
        for shift in SHIFTS[comparison.name]:
            yield from crossing(difference + shift, item)


def difference_of(comparison: Op) -> Index | None:
    left, right = map(as_index, comparison.operands)
    return None if left is None or right is None else left - right


def as_index(value: Expr) -> Index | None:
    if value.dtype is not torch.int64:
        return None
    if isinstance(value, IndexValue):
        return value.index
    return number(value.value) if isinstance(value, Const) and isinstance(value.value, int) else None


def changes_in(index: Index, item: Axis) -> Iterator[int]:
    """Where the greater, or smaller, of several indices becomes another; inner ones first."""
    if item not in index.atoms:
        return
    match index:
        case Sum():
            for part, _factor in index.terms:
                yield from changes_in(part, item)
        case Product():
            for part in index.factors:
                yield from changes_in(part, item)
        case Min() | Max():
            for part in index.items:
                yield from changes_in(part, item)
            first, *others = index.items
            for other in others:
                yield from crossing(first - other, item)


def crossing(difference: Index, item: Axis) -> Iterator[int]:
    """The first place at which the sign of `factor * item + constant` is another than before, if that is inside."""
    constant = substitute(difference, {item: number(0)})
    slope = difference - constant
    if not isinstance(constant, Number) or slope.atoms != {item}:
        return
    factor = substitute(slope, {item: number(1)})
    if not isinstance(factor, Number) or factor.value == 0 or slope is not item * factor:
        return
    # negative before and not after, or the reverse
    place = -(constant.value // factor.value) if factor.value > 0 else constant.value // -factor.value + 1
    if 0 < place < known_extent(item):
        yield place


# --- what is known in a part ------------------------------------------------------------------------------------------


def decided(statement: Statement) -> Statement:
    """The statement with every condition that bounds of indices decide as what it comes to."""
    assert isinstance(statement, Let | Store)
    return replace(statement, value=rewrite_nodes(statement.value, known_value))


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
            return joined(item)
        case name if name in SHIFTS:
            answer = answer_of(item)
            return item if answer is None else const(answer, torch.bool)
    return item


def chosen(condition: Expr, yes: Expr, no: Expr) -> Expr | None:
    if not isinstance(condition, Const):
        return None
    return yes if condition.value else no


def joined(item: Op) -> Expr:
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
    if difference is None or difference.low is None or difference.high is None:
        return None
    low, high = difference.low, difference.high
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
