"""Columns that are only reduced: memory is gone through in its order, row by row, and what the columns have come to so
far waits in a tile that fits into the nearest cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ferrite.ir import STATES, Axis, Expr, Index, Load, Local, Number
from ferrite.ir.kernel import Let, Loop, Scratch, State, Statement, Store, Update, nodes_in
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import shared, vector_loop
from ferrite.schedule.fusion.accesses import likely, likely_points, upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, collapse, cut, indices_at, nested, replaced, with_values, work_of
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.plain_loops import MAX_SUMMED_ROWS, sums_floats, with_states
from ferrite.schedule.loops.reductions import STORE_MODES
from ferrite.schedule.loops.statements import Parts


def is_column_reduction(nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine) -> bool:
    """Whether every nest only reduces, by what a store can do, and what is done once a row comes after that."""
    looping = [bool(nest.axes) for nest in nests]
    if looping != sorted(looping, reverse=True):
        return False
    reducing = [(nest, part) for nest, part in zip(nests, parts, strict=True) if nest.axes]
    if uses_results([part for _, part in reducing]):
        return False
    many = max(likely_points(nest.axes) for nest, _ in reducing)
    return many > machine.max_rows_without_tile and all(
        not nest.ordered
        and not nest.outer
        and part.states
        and all(state.kind in STORE_MODES for state in part.states)
        and not any(isinstance(statement, Store) for statement in part.point)
        for nest, part in reducing
    )


def uses_results(parts: Sequence[Parts]) -> bool:
    """Whether one reduction needs what an earlier one has come to: a softmax of columns, its greatest values. Results
    are there only after all memory has been gone through."""
    results: set[str] = set()
    for part in parts:
        used = {item.name for statement in part.point for item in nodes_in(statement) if isinstance(item, Local)}
        if not results.isdisjoint(used):
            return True
        results |= {name for state in part.states for name in state.names}
        results |= {statement.name for statement in part.after if isinstance(statement, Let)}
    return False


def column_reduction(
    rows: Sequence[Axis], column: Axis, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine
) -> Body:
    others = [row for row in rows if row is not column]
    least = machine.min_thread_columns
    extent = column.extent.value if isinstance(column.extent, Number) else max(likely(column.extent), least)
    width = min(extent, machine.tile_columns)
    if not others:  # threads can share nothing but the columns
        width = min(width, max(width // machine.max_column_parts // least * least, least))
    block, inside, _ = cut(column, width, ())
    states = [state for part in parts for state in part.states]
    body: Body = (cleared(states, column, machine),)
    results: dict[Expr, Expr] = {}
    last: list[Statement] = []
    work = 0
    for nest, part in zip(nests, parts, strict=True):
        if nest.axes:
            if in_short_sums(nest, part):
                states += short_sums(part)
            body += gone_through(nest, part, column, machine)
            work += work_of(tuple(part.point)) * likely_points(nest.axes)
            for state in part.states:
                local = Local.intern(state.names[0], state.dtypes[0])
                results[local] = Load.intern(tile_name(state), (column,), state.dtypes[0])
            last += part.after
        else:
            last += part.point
    body += (vector_loop(column, tuple(with_values(item, results) for item in last), machine),)
    tiles: Body = tuple(Scratch(tile_name(state), state.dtypes[0], (inside.extent,)) for state in states)
    body = tiles + over(body, column, inside, block * width)
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
    loads: dict[Expr, Expr] = {
        item: Load.intern(item.buffer, (inside,), item.dtype)
        for item in nodes_in(statement)
        if isinstance(item, Load) and item.buffer.endswith("_so_far")
    }
    if loads:
        statement = with_values(statement, loads)
    if isinstance(statement, Store) and statement.coordinates == (column,) and statement.buffer.endswith("_so_far"):
        return Store(statement.buffer, (inside,), statement.value, statement.mode)
    return statement


def gone_through(nest: Nest, part: Parts, column: Axis, machine: Machine) -> Body:
    """Rows are combined into the tiles one by one; long sums of floats as shorter ones, in tiles of their own."""
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(tuple(part.point))), tuple(part.point))
    if not in_short_sums(nest, part):
        return nested(axes, (into_tiles(body, part.states, column, machine),), "serial")
    block, row, body = cut(axes[-1], MAX_SUMMED_ROWS, body)
    short = short_sums(part)
    renamed = {state.names[0]: each.names[0] for state, each in zip(part.states, short, strict=True)}
    body = tuple(with_states(item, renamed) for item in body)
    rows = nested([row], (into_tiles(body, short, column, machine),), "serial")
    combines = tuple(
        Store(
            tile_name(state),
            (column,),
            Load.intern(tile_name(each), (column,), each.dtypes[0]),
            STORE_MODES[state.kind],
        )
        for state, each in zip(part.states, short, strict=True)
    )
    return nested(
        [*axes[:-1], block], (cleared(short, column, machine), *rows, vector_loop(column, combines, machine)), "serial"
    )


def in_short_sums(nest: Nest, part: Parts) -> bool:
    rows = math.prod(upper_estimate(item.extent, 1 << 30) for item in nest.reduced)
    return sums_floats(part.states) and rows > 4 * MAX_SUMMED_ROWS


def short_sums(part: Parts) -> list[State]:
    return [replace(state, names=(f"{state.names[0]}_part",)) for state in part.states]


def cleared(states: Sequence[State], column: Axis, machine: Machine) -> Loop:
    first = tuple(Store(tile_name(state), (column,), STATES[state.kind].begin(state.dtypes)[0]) for state in states)
    return vector_loop(column, first, machine)


def into_tiles(body: Body, states: Sequence[State], column: Axis, machine: Machine) -> Loop:
    """A loop over the columns in which what a state is combined with is combined into its tile."""
    modes = {state.names[0]: (tile_name(state), STORE_MODES[state.kind]) for state in states}
    found: list[Statement] = []
    for statement in body:
        if isinstance(statement, Update):
            tile, mode = modes[statement.state]
            found.append(Store(tile, (column,), statement.values[0], mode))
        else:
            found.append(statement)
    return vector_loop(column, tuple(found), machine)


def tile_name(state: State) -> str:
    return f"{state.names[0]}_so_far"
