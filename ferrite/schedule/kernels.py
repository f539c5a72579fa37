"""A group becomes a kernel. Three shapes:

flat      no stage has axes beside the rows: one loop nest over all of them, cut into blocks for threads
rows      threads share the rows; inside a row one nest after the other, with vectors along the nest's axes
columns   rows lie side by side in memory: vectors are made of rows, and the nests inside are plain loops
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ferrite.ir.expr import Local
from ferrite.ir.index import ONE, Axis, Index, Number, Symbol, axis, minimum
from ferrite.ir.kernel import (
    Accumulate,
    Join,
    Kernel,
    Loop,
    Pointer,
    Scratch,
    State,
    Statement,
    Store,
    indices_in,
    nodes_in,
    walk,
)
from ferrite.ir.program import Origin, Scan
from ferrite.ir.questions import data_of, indices_of, symbols_in
from ferrite.schedule.groups import Group
from ferrite.schedule.homes import Homes
from ferrite.schedule.loops import (
    Body,
    collapse,
    indices_at,
    lanes_for,
    nested,
    ordered_axes,
    replaced,
    rows_at_once,
    unrolling,
    vector_axis,
    vector_loop,
    work_of,
)
from ferrite.schedule.machine import Machine
from ferrite.schedule.nests import Nest, nests_of, trivial
from ferrite.schedule.sharing import shared_tiles
from ferrite.schedule.statements import Parts, Statements
from ferrite.schedule.touches import Layouts, axes_in, known, step_of

GUESS = 64
BLOCK = 4096  # elements of a flat loop that one step of a thread takes
SUMMED = 2048  # elements that are summed before the sum joins another: how far rounding errors can grow
SUMMED_ACROSS = 64  # the same where every result has one state, not one per lane
TILE = 32  # rows and columns of a block where some memory goes along and some across


@dataclass(frozen=True)
class Built:
    """`arguments`: the storages behind the pointers."""

    kernel: Kernel
    arguments: tuple[str, ...]


def build(group: Group, inside: Iterable[str], layouts: Layouts, machine: Machine) -> Built:
    """The kernel of a group; `inside`: storages that nothing else touches."""
    nests = nests_of(group, layouts)
    rows = tuple(row for row in group.rows)
    homes = Homes(nests, rows, inside, layouts, machine)
    made = Statements(homes, layouts, rows)
    parts = [made.nest(nest) for nest in nests]
    tiles: Body = tuple(tile.scratch for tile in homes.tiles.values())
    tiles += tuple(shared_tiles(nests, parts, homes.room))
    if all(not nest.axes for nest in nests) and not tiles and not any(part.states for part in parts):
        body = flat(rows, tuple(itertools_chain(parts)), machine)
    else:
        column = column_axis(rows, nests, parts)
        if column is not None:
            body = columns(rows, column, tiles, nests, parts, machine)
        else:
            body = by_rows(rows, tiles, nests, parts, machine)
    pointers = pointers_of(made)
    return Built(Kernel(pointers, sizes_of(body), body, origins_of(group)), tuple(item.name for item in pointers))


def itertools_chain(parts: Iterable[Parts]) -> list[Statement]:
    return [statement for part in parts for statement in part.point]


# --- shapes -----------------------------------------------------------------------------------------------------------


def flat(rows: Sequence[Axis], body: Body, machine: Machine) -> Body:
    indices = indices_at(body)
    order = ordered_axes(rows, indices)
    if len(order) > 1:
        across = crossing(order, indices)
        if across is not None:
            return tiled(order, across, body, machine)
    axes, body = collapse(order, body)
    if not axes:
        return body
    *outer, last = axes
    if not isinstance(last.extent, Number) or last.extent.value > 2 * BLOCK:
        block, last, body = cut(last, BLOCK, body)
        outer.append(block)
    work = work_of(body)
    inner = (vector_loop(last, body, machine),)
    return shared(outer, inner, work * known(last.extent, BLOCK), machine)


def shared(axes: Sequence[Axis], body: Body, work: int, machine: Machine) -> Body:
    """Loops that threads share; a thread gets several rounds of the innermost where one is little work."""
    if not axes:
        return body
    (inner,) = nested(axes[-1:], body, "parallel")
    assert isinstance(inner, Loop)
    copies = rows_at_once(body, machine, work)
    loop = Loop(inner.axis, "parallel", inner.body, copies=copies)
    return nested(axes[:-1], (loop,), "parallel")


def by_rows(rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine) -> Body:
    body = tiles
    work = 0
    for nest, part in zip(nests, parts, strict=True):
        body += nest_loops(nest, part, machine)
        work += work_of(tuple(part.point)) * math.prod(known(item.extent, GUESS) for item in nest.axes)
    axes, body = collapse(list(rows), body)
    return shared(axes, body, work, machine)


def columns(
    rows: Sequence[Axis],
    column: Axis,
    tiles: Body,
    nests: Sequence[Nest],
    parts: Sequence[Parts],
    machine: Machine,
) -> Body:
    body: Body = tiles
    work = 0
    for nest, part in zip(nests, parts, strict=True):
        body += plain_loops(nest, part)
        work += work_of(tuple(part.point)) * math.prod(known(item.extent, GUESS) for item in nest.axes)
    lanes = lanes_for(body, machine)
    copies = 4 * unrolling(body, work_of(body))
    others = [row for row in rows if row is not column]
    outer, body = collapse(others, body)
    if not isinstance(column.extent, Number) and any(combines(statement) for statement in walk(body)):
        # where memory decides the place, blocks of a length that is not known cannot be told apart
        return shared(outer, (Loop(column, "vector", body, lanes, copies),), work * GUESS, machine)
    block, last, body = cut(column, lanes * copies, body)
    inner = (Loop(last, "vector", body, lanes, copies),)
    return shared([*outer, block], inner, work * lanes * copies, machine)


def combines(statement: Statement) -> bool:
    return isinstance(statement, Store) and statement.mode != "set" and any(map(data_of, statement.coordinates))


def tiled(order: Sequence[Axis], across: Axis, body: Body, machine: Machine) -> Body:
    """Square blocks of the two axes that memory goes along: what is fetched for one is there for the other."""
    last = order[-1]
    outer = [item for item in order if item is not last and item is not across]
    rows, row, body = cut(across, TILE, body)
    cols, col, body = cut(last, TILE, body)
    work = work_of(body)
    inner: Body = (Loop(row, "serial", (vector_loop(col, body, machine),)),)
    blocks, inner = collapse([*outer, rows, cols], inner)
    return shared(blocks, inner, work * TILE * TILE, machine)


def crossing(order: Sequence[Axis], indices: Sequence[Index]) -> Axis | None:
    """Another axis along which some memory lies side by side that does not along the vector axis."""
    last = order[-1]
    for index in indices:
        step = step_of(index, last)
        if step is ONE or (isinstance(step, Number) and step.value == 0):
            continue
        for item in order[:-1]:
            if step_of(index, item) is ONE and known(item.extent, GUESS) >= 8 and known(last.extent, GUESS) >= 8:
                return item
    return None


def column_axis(rows: Sequence[Axis], nests: Sequence[Nest], parts: Sequence[Parts]) -> Axis | None:
    """The row axis that vectors are best made of, where that is not an axis of a nest."""
    found: Axis | None = None
    for nest, part in zip(nests, parts, strict=True):
        if not nest.axes or all(trivial(item) for item in nest.axes):
            continue
        inner = set(nest.axes)
        indices = [index for index in indices_at(tuple(part.point)) if not axes_in(index).isdisjoint(inner)]
        best = vector_axis([*rows, *nest.axes], indices)
        if best is None or best not in rows:
            return None
        found = found or best
    return found


def cut(item: Axis, size: int, body: Body) -> tuple[Axis, Axis, Body]:
    """An axis as blocks of a size, the last of them perhaps smaller: the blocks, and the places in one."""
    block = axis(f"{item.name}_block", (item.extent + (size - 1)) // size)
    inside = axis(f"{item.name}_in", minimum(size, item.extent - block * size))
    return block, inside, replaced(body, {item: block * size + inside})


# --- nests ------------------------------------------------------------------------------------------------------------


def nest_loops(nest: Nest, part: Parts, machine: Machine) -> Body:
    body: Body = tuple(part.point)
    if nest.ordered or not nest.axes:
        return plain_loops(nest, part)
    if not part.states:
        axes, body = collapse(ordered_axes(nest.axes, indices_at(body)), body)
        if not axes:
            return body
        inner: Body = (vector_loop(axes[-1], body, machine),)
        return nested(axes[:-1], inner, "serial")
    best = vector_axis(nest.axes, indices_at(body))
    if best in nest.outer:
        return reduced_across(nest, part, best, machine)
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(body)), body)
    whole = accumulated(part.states, axes, body, machine) + tuple(part.after)
    outer, whole = collapse(list(nest.outer), whole)
    return nested(outer, whole, "serial")


def reduced_across(nest: Nest, part: Parts, best: Axis, machine: Machine) -> Body:
    """Reductions whose results lie side by side: a vector holds the states of several results."""
    block: Body = (*summed_across(nest, part), *part.after)
    others, block = collapse([item for item in nest.outer if item is not best], block)
    return nested(others, (vector_loop(best, block, machine),), "serial")


def summed_across(nest: Nest, part: Parts) -> Body:
    """Plain loops over what is reduced. Long sums of floats are made of shorter ones."""
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(tuple(part.point))), tuple(part.point))
    longest = known(axes[-1].extent, 1 << 30) if axes else 0
    if not sums_floats(part.states) or longest <= 4 * SUMMED_ACROSS:
        return (Accumulate(tuple(part.states), nested(axes, body, "reduction")),)
    block, inside, body = cut(axes[-1], SUMMED_ACROSS, body)
    return in_parts(part.states, [*axes[:-1], block], nested([inside], body, "reduction"))


def sums_floats(states: Sequence[State]) -> bool:
    return any(state.kind in ("sum", "prod") and state.dtypes[0].is_floating_point for state in states)


def accumulated(states: Sequence[State], axes: Sequence[Axis], body: Body, machine: Machine) -> Body:
    """Loops over what is reduced. Long sums of floats are made of shorter ones."""
    if not axes:
        return (Accumulate(tuple(states), body),)
    *outer, last = axes
    loop = vector_loop(last, body, machine, "reduction")
    longest = known(last.extent, 1 << 30)
    rounds = math.prod(known(item.extent, GUESS) for item in outer)
    sums = sums_floats(states)
    if sums and longest > 2 * SUMMED:
        block, inside, cut_body = cut(last, SUMMED, body)
        short = Loop(inside, "reduction", cut_body, loop.lanes, loop.copies)
        return in_parts(states, [*outer, block], (short,))
    if sums and rounds * longest > 2 * SUMMED and longest >= 64:
        return in_parts(states, outer, (loop,))
    return (Accumulate(tuple(states), nested(outer, (loop,), "reduction")),)


def in_parts(states: Sequence[State], axes: Sequence[Axis], inner: Body) -> Body:
    """A state for every round of the axes, joined to the whole when the round is over."""
    renamed = {name: f"{name}_part" for state in states for name in state.names}
    parts = tuple(
        State(state.kind, tuple(renamed[name] for name in state.names), state.dtypes, state.combine) for state in states
    )
    block = Accumulate(parts, tuple(with_states(statement, renamed) for statement in inner))
    joins = tuple(
        Join(
            state.names[0],
            tuple(Local.intern(renamed[name], dtype) for name, dtype in zip(state.names, state.dtypes, strict=True)),
        )
        for state in states
    )
    return (Accumulate(tuple(states), nested(axes, (block, *joins), "serial")),)


def with_states(statement: Statement, new: dict[str, str]) -> Statement:
    match statement:
        case Join():
            return Join(new.get(statement.state, statement.state), statement.values)
        case Loop():
            body = tuple(with_states(item, new) for item in statement.body)
            return Loop(statement.axis, statement.kind, body, statement.lanes, statement.copies)
    return statement


def plain_loops(nest: Nest, part: Parts) -> Body:
    """Loops one by one, in the order of the operation."""
    body: Body = tuple(part.point)
    if not part.states:
        return nested(nest.axes, body, "serial") + tuple(part.after)
    if nest.ordered:  # a scan: only along its own axis does a state go on
        along = [item for stage in nest.stages if isinstance(stage.operation, Scan) for item in (stage.operation.along,)]
        others = [item for item in nest.axes if item not in along]
        scan = Accumulate(tuple(part.states), nested(along, body, "serial"))
        return nested(others, (scan, *part.after), "serial")
    return nested(nest.outer, (*summed_across(nest, part), *part.after), "serial")


# --- the frame --------------------------------------------------------------------------------------------------------


def pointers_of(made: Statements) -> tuple[Pointer, ...]:
    """What is written first: the order is the caller's, and equal kernels want equal orders."""
    names = dict.fromkeys([*sorted(made.written), *sorted(made.read)])
    found = []
    for name in names:
        access = ("both" if name in made.read else "write") if name in made.written else "read"
        found.append(Pointer(name, made.types[name], access))  # type: ignore[arg-type]
    return tuple(found)


def sizes_of(body: Body) -> tuple[Symbol, ...]:
    found: set[Symbol] = set()
    for statement in walk(body):
        for index in indices_in(statement):
            found.update(symbols_in(index))
        for item in nodes_in(statement):
            for index in indices_of(item):
                found.update(symbols_in(index))
    return tuple(sorted(found, key=lambda item: item.name))


def origins_of(group: Group) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(operation.origin for operation in group.operations))


def scratch_of(body: Body) -> list[Scratch]:
    return [statement for statement in walk(body) if isinstance(statement, Scratch)]
