"""The shapes of a kernel: how the loops around the statements of a group are arranged.

flat      no stage has axes beside the rows: one loop nest over all of them, cut into blocks for threads
rows      threads share the rows; inside a row one nest after the other, with vectors along the nest's axes
columns   rows lie side by side in memory: vectors are made of rows, and the nests inside are plain loops
streams   columns that are only reduced: memory is gone through in its order, a few rows at a time, and what the
          columns have come to so far waits in a tile
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.ir.expr import Expr, Load, Local
from ferrite.ir.index import Axis, Index, Number
from ferrite.ir.kernel import Accumulate, Loop, Scratch, State, Statement, Store, nodes_in, walk
from ferrite.ir.program import Mode
from ferrite.ir.questions import data_of
from ferrite.ir.states import STATES
from ferrite.schedule.loops import (
    Body,
    collapse,
    cut,
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
from ferrite.schedule.nest_loops import nest_loops, plain_loops
from ferrite.schedule.nests import Nest, trivial
from ferrite.schedule.sharing import with_values
from ferrite.schedule.statements import Parts
from ferrite.schedule.tiles import crossing, tiled
from ferrite.schedule.touches import axes_in, known

GUESS = 64
BLOCK = 4096  # elements of a flat loop that one step of a thread takes
STREAMS = 8  # rows that are gone through side by side
WIDE = 2048  # columns whose states wait in a tile
NARROW = 128  # columns that threads get at least
PARTS = 8
FEW = 64  # rows to reduce, for which a tile does not pay


def arranged(
    rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine
) -> Body:
    """The whole body of a kernel."""
    if all(not nest.axes for nest in nests) and not tiles and not any(part.states for part in parts):
        return flat(rows, tuple(statement for part in parts for statement in part.point), machine)
    column = column_axis(rows, nests, parts)
    if column is None:
        return by_rows(rows, tiles, nests, parts, machine)
    if not tiles and streamable(column, nests, parts):
        return streams(rows, column, nests, parts, machine)
    return columns(rows, column, tiles, nests, parts, machine)


def flat(rows: Sequence[Axis], body: Body, machine: Machine) -> Body:
    indices = indices_at(body)
    order = ordered_axes(rows, indices)
    if len(order) > 1:
        across = crossing(order, indices)
        if across is not None:
            blocks, inner, work = tiled(order, across, body, machine)
            return shared(blocks, inner, work, machine)
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


# --- streams ----------------------------------------------------------------------------------------------------------

MODES: dict[str, Mode] = {"sum": "add", "prod": "mul", "amax": "amax", "amin": "amin"}


def streamable(column: Axis, nests: Sequence[Nest], parts: Sequence[Parts]) -> bool:
    """Whether every nest only reduces, by what a store can do, and what is done once a row comes after that."""
    looping = [bool(nest.axes) for nest in nests]
    if looping != sorted(looping, reverse=True) or not isinstance(column.extent, Number):
        return False
    reducing = [(nest, part) for nest, part in zip(nests, parts, strict=True) if nest.axes]
    many = max(math.prod(known(item.extent, GUESS) for item in nest.axes) for nest, _ in reducing)
    return many > FEW and all(
        not nest.ordered
        and not nest.outer
        and part.states
        and all(state.kind in MODES for state in part.states)
        and not any(isinstance(statement, Store) for statement in part.point)
        for nest, part in reducing
    )


def streams(
    rows: Sequence[Axis], column: Axis, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine
) -> Body:
    others = [row for row in rows if row is not column]
    width = min(known(column.extent, WIDE), WIDE)
    if not others:  # threads can share nothing but the columns
        width = min(width, max(width // PARTS // NARROW * NARROW, NARROW))
    block, inside, _ = cut(column, width, ())
    states = [state for part in parts for state in part.states]
    begin: Body = tuple(Scratch(tile_name(state), state.dtypes[0], (inside.extent,)) for state in states)
    first = tuple(Store(tile_name(state), (column,), STATES[state.kind].begin(state.dtypes)[0]) for state in states)
    body: Body = (vector_loop(column, first, machine),)
    results: dict[Expr, Expr] = {}
    last: list[Statement] = []
    work = 0
    for nest, part in zip(nests, parts, strict=True):
        if nest.axes:
            body += gone_through(nest, part, column, machine)
            work += work_of(tuple(part.point)) * math.prod(known(item.extent, GUESS) for item in nest.axes)
            for state in part.states:
                local = Local.intern(state.names[0], state.dtypes[0])
                results[local] = Load.intern(tile_name(state), (column,), state.dtypes[0])
            last += part.after
        else:
            last += part.point
    body += (vector_loop(column, tuple(with_values(item, results) for item in last), machine),)
    body = begin + over(body, column, inside, block * width)
    others, body = collapse(others, body)
    return shared([*others, block], body, work * width, machine)


def over(body: Body, column: Axis, inside: Axis, start: Index) -> Body:
    """Loops over a whole axis as loops over one block of it; tiles count from where the block begins."""
    found: list[Statement] = []
    for statement in body:
        match statement:
            case Loop(axis=item) if item is column:
                inner = tuple(in_tiles(each, column, inside) for each in statement.body)
                inner = replaced(inner, {column: start + inside})
                found.append(Loop(inside, statement.kind, inner, statement.lanes, statement.copies))
            case Loop():
                found.append(Loop(statement.axis, statement.kind, over(statement.body, column, inside, start)))
            case _:
                found.append(statement)
    return tuple(found)


def in_tiles(statement: Statement, column: Axis, inside: Axis) -> Statement:
    """Tiles of states are indexed by the place in the block."""
    if isinstance(statement, Store) and statement.coordinates == (column,) and statement.buffer.endswith("_so_far"):
        return Store(statement.buffer, (inside,), statement.value, statement.mode)
    loads: dict[Expr, Expr] = {
        item: Load.intern(item.buffer, (inside,), item.dtype)
        for item in nodes_in(statement)
        if isinstance(item, Load) and item.buffer.endswith("_so_far")
    }
    return with_values(statement, loads) if loads else statement


def gone_through(nest: Nest, part: Parts, column: Axis, machine: Machine) -> Body:
    """A few rows at a time: their values join states in registers, and those the tiles."""
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(tuple(part.point))), tuple(part.point))
    rows, row, body = cut(axes[-1], STREAMS, body)
    block = Accumulate(tuple(part.states), (Loop(row, "unrolled" if is_number(row.extent) else "reduction", body),))
    joins: Body = tuple(
        Store(tile_name(state), (column,), Local.intern(state.names[0], state.dtypes[0]), MODES[state.kind])
        for state in part.states
    )
    inner: Body = (block, *joins)
    loop = Loop(column, "vector", inner, lanes_for(inner, machine), 2)
    return nested([*axes[:-1], rows], (loop,), "serial")


def is_number(index: Index) -> bool:
    return isinstance(index, Number)


def tile_name(state: State) -> str:
    return f"{state.names[0]}_so_far"
