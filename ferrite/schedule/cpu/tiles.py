"""Blocks of two axes, where some memory goes along one of them and some along the other.

What is loaded across the vectors is first copied into a tile, along its own direction: every line of the cache is
fetched once and used whole. The copy turns it, a square of as many rows as a vector has lanes at a time, so that the
tile is read along the vectors; it fits into the nearest cache, and its rows are long enough that memory is read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ferrite.ir import Axis, Expr, Index, Load, Masked, axis, data_of, nodes_of, number
from ferrite.ir.kernel import Loop, Scratch, Statement, Store, nodes_in
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import vector_loop
from ferrite.schedule.fusion.accesses import upper_estimate
from ferrite.schedule.loops.axes import Body, collapse, cut, index_over, with_values, work_of
from ferrite.schedule.loops.memory_order import goes_across


def tiled(order: Sequence[Axis], across: Axis, body: Body, machine: Machine) -> tuple[list[Axis], Body, int]:
    """The axes of blocks, what is done in one, and how much work that is. The last of `order` is the vector axis."""
    last = order[-1]
    outer = [item for item in order if item is not last and item is not across]
    crossed = crossing_loads(across, last, body)
    side = side_of(across, last, machine)
    rows, row, body = cut(across, side, body)
    columns, column, body = cut(last, side, body)
    place = {across: rows * side + row, last: columns * side + column}
    tiles: list[Statement] = []
    copies: list[Statement] = []
    again: dict[Expr, Expr] = {}
    for number_, load in enumerate(crossed):
        name = f"tile{number_}"
        moved = Load.intern(load.buffer, tuple(index_over(item, place) for item in load.coordinates), load.dtype)
        tiles.append(Scratch(name, load.dtype, (number(side * side),)))
        copies.append(copied(name, moved, row, column, side, machine))
        again[moved] = Load.intern(name, (row * side + column,), load.dtype)
    if again:
        body = tuple(with_values(statement, again) for statement in body)
    inner: Body = (*tiles, *copies, Loop(row, "serial", (vector_loop(column, body, machine),)))
    blocks, inner = collapse([*outer, rows, columns], inner)
    return blocks, inner, work_of(body) * side * side


def side_of(across: Axis, last: Axis, machine: Machine) -> int:
    """How long a tile is. Where one axis is short, memory is read in its order however long: with wide vectors, which
    fill a line of the cache at once, a small tile is then 10 % faster; with narrow ones it is slower."""
    side = machine.tile_side
    short = min(upper_estimate(across.extent, side), upper_estimate(last.extent, side)) <= side // 2
    return side // 4 if short and machine.vector_bytes > 16 else side


def copied(name: str, load: Load, row: Axis, column: Axis, side: int, machine: Machine) -> Loop:
    """Loops that copy what is loaded, along the rows, and turn it."""
    along, beside = axis(f"{row.name}_{name}", row.extent), axis(f"{column.name}_{name}", column.extent)
    new: dict[Axis, Index] = {row: along, column: beside}
    value = Load.intern(load.buffer, tuple(index_over(item, new) for item in load.coordinates), load.dtype)
    store = Store(name, (along * side + beside,), value)
    vectors = vector_loop(along, (store,), machine)
    return Loop(beside, "vector", (replace(vectors, copies=1),), copies=vectors.lanes)


def crossing_loads(across: Axis, last: Axis, body: Body) -> list[Load]:
    """Loads along the other axis. What is loaded only where a mask holds must not be loaded elsewhere."""
    nodes = dict.fromkeys(item for statement in body for item in nodes_in(statement))
    guarded = {inner for item in nodes if isinstance(item, Masked) for inner in nodes_of(item.value)}
    stored = {statement.buffer for statement in body if isinstance(statement, Store)}
    return [
        item
        for item in nodes
        if isinstance(item, Load)
        and item not in guarded
        and item.buffer not in stored
        and len(item.coordinates) == 1
        and not data_of(item.coordinates[0])
        and goes_across(item.coordinates[0], across, last)
    ]
