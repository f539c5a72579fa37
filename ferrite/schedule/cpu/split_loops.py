"""Loops parted where a condition on their axis changes, so that nothing is asked at every element.

    for i in vector(66):                        for i in vector(1):  y[i] = 0
        y[i] = masked(0 <= i - 1 < 64,    =>    for i in vector(64): y[i + 1] = x[i]
                      x[i - 1], 0)              for i in vector(1):  y[i + 65] = 0

So paddings, writes into slices and mirrored edges are plain copies but at their edges. The place may be a size that is
known when the kernel runs. Conditions that depend on other axes too are left where sizes are numbers: they are the same
for a whole vector, or have no place at which they change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ferrite.ir import (
    ONE,
    ZERO,
    Atom,
    Axis,
    Data,
    Expr,
    Index,
    Masked,
    Max,
    Min,
    Number,
    Op,
    Product,
    Sum,
    Symbol,
    axis,
    const,
    indices_of,
    maximum,
    minimum,
    rebuild,
    rewrite_nodes,
    substitute,
    with_parts,
)
from ferrite.ir.kernel import Accumulate, Let, Loop, Statement, Store, When, nodes_in
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import vector_loop
from ferrite.schedule.loops.axes import Body, replaced
from ferrite.schedule.loops.conditions import SHIFTS, difference_of, known_value

MAX_RANGES = 6  # of one loop: each has code of its own
MAX_STATEMENTS = 64  # of a body that is written out once for every piece


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
    return len(loop.body) <= MAX_STATEMENTS and all(isinstance(statement, Let | Store) for statement in loop.body)


def pieces_of(loop: Loop, machine: Machine) -> list[Statement]:
    pieces = [(loop.axis, loop.body)]
    place = 0
    while place < len(pieces):
        item, body = pieces[place]
        cut = next(changes(item, body), None)
        if cut is None:
            place += 1
            continue
        if len(pieces) == MAX_RANGES:
            return [loop]
        before = piece(item, body, ZERO, cut.place, {cut.difference: cut.negative_before})
        after = piece(item, body, cut.place, item.extent - cut.place, {cut.difference: not cut.negative_before})
        pieces[place : place + 1] = [before, after]
    if len(pieces) == 1:
        return [loop]
    return [vector_loop(item, body, machine) for item, body in pieces]


def piece(loop_axis: Axis, body: Body, start: Index, extent: Index, negative: dict[Index, bool]) -> tuple[Axis, Body]:
    """The statements for a part of the range, with what is now known decided. `negative`: what is below zero there."""
    part = axis(loop_axis.name, extent)
    told = tuple(answered(statement, negative) for statement in body)
    return part, tuple(decided(statement) for statement in replaced(told, {loop_axis: part + start}))


def decided_regions(axes: Sequence[Axis], body: Body) -> list[tuple[list[Axis], Body]]:
    """The points of some axes as regions, in each of which conditions on these axes are decided: the inside of an image
    and its edges. None if there would be many, or a single one."""
    found, waiting = [], [(list(axes), body)]
    while waiting:
        here, body = waiting.pop()
        cuts = ((place, cut) for place, item in enumerate(here) for cut in changes(item, body))
        if (first := next(cuts, None)) is None:
            found.append((here, body))
            continue
        if len(found) + len(waiting) + 2 > MAX_RANGES:
            return []
        place, cut = first
        whole = here[place]
        for start, extent, negative in (
            (ZERO, cut.place, cut.negative_before),
            (cut.place, whole.extent - cut.place, not cut.negative_before),
        ):
            part, told = piece(whole, body, start, extent, {cut.difference: negative})
            waiting.append(([*here[:place], part, *here[place + 1 :]], told))
    return found if len(found) > 1 else []


# --- where conditions change ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignChange:
    """The first place at which the sign of a difference is another than before."""

    place: Index
    difference: Index
    negative_before: bool


def changes(loop_axis: Axis, body: Body) -> Iterator[SignChange]:
    """Places inside the range at which something changes that loads, or what is loaded, depend on."""
    for statement in body:
        for node in nodes_in(statement):
            if isinstance(node, Masked):
                for part in conditions(node.mask):
                    yield from change_of_comparison(part, loop_axis)
            for index in indices_of(node):
                yield from changes_in(index, loop_axis)
        if isinstance(statement, Store):
            for index in statement.coordinates:
                yield from changes_in(index, loop_axis)


def conditions(mask: Expr) -> Iterator[Op]:
    """The comparisons that a condition is made of."""
    if isinstance(mask, Op):
        if mask.name in ("logical_and", "logical_or", "logical_not"):
            for operand in mask.operands:
                yield from conditions(operand)
        elif mask.name in SHIFTS:
            yield mask


def change_of_comparison(comparison: Op, loop_axis: Axis) -> Iterator[SignChange]:
    difference = difference_of(comparison)
    if difference is not None:
        for shift in SHIFTS[comparison.name]:
            yield from crossing(difference + shift, loop_axis)


def changes_in(index: Index, loop_axis: Axis) -> Iterator[SignChange]:
    """Where the greater, or smaller, of several indices becomes another; inner ones first."""
    if loop_axis not in index.atoms:
        return
    match index:
        case Sum():
            for part, _factor in index.terms:
                yield from changes_in(part, loop_axis)
        case Product():
            for part in index.factors:
                yield from changes_in(part, loop_axis)
        case Min() | Max():
            for part in index.items:
                yield from changes_in(part, loop_axis)
            first, *others = index.items
            for other in others:
                yield from crossing(first - other, loop_axis)


def crossing(difference: Index, loop_axis: Axis) -> Iterator[SignChange]:
    """Where `factor * item + rest` becomes negative, or no longer is, if that is inside the range.

    The rest may be a size that is known at run time. Then so is the place, and a part may turn out to be empty.
    """
    rest = substitute(difference, {loop_axis: ZERO})
    slope = difference - rest
    if slope.atoms != {loop_axis}:
        return
    factor = substitute(slope, {loop_axis: ONE})
    if not isinstance(factor, Number) or factor.value == 0 or slope is not loop_axis * factor:
        return
    rises = factor.value > 0
    place = -(rest // factor) if rises else rest // -factor + 1
    if isinstance(place, Number) and isinstance(loop_axis.extent, Number):
        if 0 < place.value < loop_axis.extent.value:
            yield SignChange(place, difference, rises)
    elif depends_on_sizes(*rest.atoms, *loop_axis.extent.atoms):
        inside = minimum(maximum(place, 0), loop_axis.extent)
        if inside is not ZERO and inside is not loop_axis.extent:
            yield SignChange(inside, difference, rises)


def depends_on_sizes(*atoms: Atom) -> bool:
    """Whether symbols are among the atoms, and nothing that memory says."""
    return any(isinstance(atom, Symbol) for atom in atoms) and not any(isinstance(atom, Data) for atom in atoms)


# --- what is known in a part ------------------------------------------------------------------------------------------


def answered(statement: Statement, negative: dict[Index, bool]) -> Statement:
    """The statement with what is asked of these differences answered."""

    def below(one: Index, other: Index) -> bool:
        """Whether one is known to be no more than another, and counts where both are the same."""
        return negative.get(one - other) is True or negative.get(other - one) is False

    def least(*items: Index) -> Index:
        return minimum(*(item for item in items if not any(below(other, item) for other in items)))

    def most(*items: Index) -> Index:
        return maximum(*(item for item in items if not any(below(item, other) for other in items)))

    def index(old: Index) -> Index:
        return rebuild(old, lambda atom: atom, least, most)

    def value(item: Expr) -> Expr:
        if isinstance(item, Op) and item.name in ("lt", "ge", "le", "gt"):
            difference = difference_of(item)
            (shift,) = SHIFTS[item.name]
            if difference is not None and (answer := negative.get(difference + shift)) is not None:
                return const(answer is (item.name in ("lt", "le")), torch.bool)
        return with_parts(item, lambda part: part, index)

    assert isinstance(statement, Let | Store)
    told = rewrite_nodes(statement.value, value)
    if isinstance(statement, Store):
        return replace(statement, coordinates=tuple(map(index, statement.coordinates)), value=told)
    return replace(statement, value=told)


def decided(statement: Statement) -> Statement:
    """The statement with every condition that bounds of indices decide as what it comes to."""
    assert isinstance(statement, Let | Store)
    return replace(statement, value=rewrite_nodes(statement.value, known_value))
