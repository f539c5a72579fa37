"""Kernels with loops inside a row: reductions, with what comes before and after them.

kept      the rows are short enough that a program holds them in registers: every loop inside is one block. A program
          has one row, or several where rows are short
looped    longer rows: every loop inside goes through the row, a block at a time. Where the length is not known, but is
          likely to be short, the kernel has both forms
columns   rows lie side by side in memory: a block is so many columns wide that lines are whole, and so many rows of
          what is reduced high
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ferrite.ir import (
    ONE,
    Axis,
    Data,
    Expr,
    Index,
    Local,
    Symbol,
    axis,
    compare,
    flat_extent,
    index_value,
    minimum,
    nodes_of,
    number,
    op,
)
from ferrite.ir.kernel import Accumulate, Let, Loop, Statement, Store, Update, When, walk
from ferrite.ir.program import Scan
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.gpu.blocks import blocked, likely_lanes, power_above, power_below, smaller_until, whole_elements
from ferrite.schedule.gpu.flat import smallest_type
from ferrite.schedule.loops.axes import Body, collapse, indices_at, nested, replaced, with_values
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.plain_loops import plain_loops
from ferrite.schedule.loops.statements import Parts


def by_rows(
    rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine, kept: bool
) -> Body:
    """`kept`: every loop inside is one block."""
    count = likely_points(rows)
    short = None if kept else short_row(nests, machine)
    if kept:
        blocks = [nest for nest in nests if nest.scans or not nest.ordered]
        elements = max((whole_elements(nest.axes) or 1 for nest in blocks), default=1)
        lanes = max(machine.rows_block // elements, 1)
        room = None
    else:
        again = sum(bool(nest.axes) for nest in nests) > 1
        lanes, room = 1, machine.again_step_elements if again else machine.row_step_elements
        if (row := likely_row(nests)) is not None:
            lanes = max(machine.rows_block // row, 1)
    lanes = smaller_until(lanes, count, machine.enough_programs)
    body: Body = ()
    for nest, part in zip(nests, parts, strict=True):
        body += nest_loops(nest, part, room)
    if short is not None:
        body = by_length(body, short)
    axes, body = collapse(list(rows), (*tiles, *body))
    if not axes:
        return body
    lanes = min(lanes, power_above(likely(axes[-1].extent)))
    return nested(axes[:-1], (Loop(axes[-1], "vector", body, lanes),), "parallel")


def likely_row(nests: Sequence[Nest]) -> int | None:
    """Lanes that are likely to hold a row of unknown length, which every loop goes through."""
    loops = [nest for nest in nests if nest.axes]
    extents = {flat_extent(item.extent for item in nest.axes) for nest in loops}
    if len(extents) != 1 or any(nest.ordered for nest in loops):
        return None
    (extent,) = extents
    if extent.high is not None or not all(isinstance(atom, Symbol) and atom.likely for atom in extent.atoms):
        return None
    return power_above(likely(extent))


def short_row(nests: Sequence[Nest], machine: GpuMachine) -> int | None:
    """The same, where several loops go through it, and it is so short that a program could keep it."""
    lanes = likely_row(nests)
    if lanes is None or sum(bool(nest.axes) for nest in nests) < 2:
        return None
    return lanes if lanes <= min(machine.kept_elements // 2, machine.again_step_elements) else None


def by_length(body: Body, lanes: int) -> Body:
    """The statements of a row twice: for one that a block of so many lanes holds, whose elements are then loaded once,
    and for a longer one. Which of the two is the same for all programs."""
    loops = [item for item in walk(body) if isinstance(item, Loop)]
    extent, *others = {loop.axis.extent for loop in loops}
    if others or any(isinstance(item, Loop) for loop in loops for item in walk(loop.body)):
        return body
    shorter = {loop.axis: axis(loop.axis.name, minimum(extent, number(lanes))) for loop in loops}
    length = index_value(extent)
    is_short = compare("le", length, index_value(number(lanes), length.dtype))
    held = tuple(over_shorter(statement, shorter, lanes) for statement in body)
    return When(is_short, held), When(op("logical_not", is_short), body)


def over_shorter(statement: Statement, shorter: Mapping[Axis, Axis], lanes: int) -> Statement:
    if isinstance(statement, Accumulate | When):
        return replace(statement, body=tuple(over_shorter(item, shorter, lanes) for item in statement.body))
    if not isinstance(statement, Loop):
        return replaced((statement,), dict(shorter))[0]
    inside = tuple(over_shorter(item, shorter, lanes) for item in statement.body)
    return replace(statement, axis=shorter[statement.axis], body=inside, lanes=lanes)


def by_columns(
    rows: Sequence[Axis], column: Axis, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine
) -> Body:
    points = tuple(statement for part in parts for statement in part.point)
    wide = likely_lanes(column.extent, machine.line_bytes // smallest_type(points))
    high = min(machine.max_block_rows, max(power_above(likely_points(nest.axes)) for nest in nests))
    wide = likely_lanes(column.extent, max(machine.step_elements // high, wide))
    others = [row for row in rows if row is not column]
    count = likely_points(others) * likely(column.extent)
    bytes_read = count * max(likely_points(nest.axes) for nest in nests) * smallest_type(points)
    near = bytes_read < machine.cache_bytes // 4  # what another kernel has just written: parts of lines will do
    least = min(wide, (machine.sector_bytes if near else machine.line_bytes) // smallest_type(points))
    wide = max(smaller_until(wide, count, machine.enough_programs), least)
    room: int | None = max(power_below(machine.step_elements // wide), 1)
    if (held := held_columns(nests, parts, wide, least, count, machine)) is not None:
        wide, room = held, None
    body: Body = ()
    for nest, part in zip(nests, parts, strict=True):
        before, inside = with_constants_before(nest, part)
        body += before + nest_loops(nest, inside, room)
    outer, body = collapse(others, body)
    return nested(outer, (Loop(column, "vector", body, wide),), "parallel")


def held_columns(
    nests: Sequence[Nest], parts: Sequence[Parts], wide: int, least: int, count: int, machine: GpuMachine
) -> int | None:
    """How many columns a program has whose elements it holds all at once, from the narrowest block that is whole lines
    on: then all of its loads are under way together, and nothing is loaded twice. None where they are too many.
    `count`: of all columns."""
    lanes = [held_lanes(nest, part) for nest, part in zip(nests, parts, strict=True)]
    if any(each is None for each in lanes):
        return None
    rows = max(each for each in lanes if each is not None)
    room = machine.column_block
    while wide > least and rows * wide > room:
        wide //= 2
    if count // wide <= machine.multiprocessors:  # which have nothing else to do
        room *= 2
    return wide if rows * wide <= room else None


def held_lanes(nest: Nest, part: Parts) -> int | None:
    """Lanes for all that a nest goes through at a column."""
    if nest.ordered or not part.states:
        return whole_elements(nest.axes)
    axes, _ = reduction_axes(nest, tuple(part.point))
    return whole_elements([*nest.outer, *axes])


def reduction_axes(nest: Nest, body: Body) -> tuple[list[Axis], Body]:
    """What is reduced, as few axes, from the slowest in memory to the fastest."""
    indices = indices_at(body)
    order = ordered_axes(nest.reduced, indices)
    if order and not any(step_of(index, order[-1]) is ONE for index in indices):  # it was last for no good reason
        order = sorted(order, key=lambda item: -longest_step(item, indices))
    return collapse(order, body)


def longest_step(item: Axis, indices: Sequence[Index]) -> int:
    steps = [step for index in indices if (step := step_of(index, item)) is not None]
    return max((abs(likely(step, 1 << 30)) for step in steps), default=0)


def with_constants_before(nest: Nest, part: Parts) -> tuple[Body, Parts]:
    """What is computed from memory in a reduction, and is the same at all of its points, computed before it."""
    if not part.states:
        return (), part
    stored = {item.buffer for item in part.point if isinstance(item, Store)}
    found: dict[Expr, Local] = {}
    within = set(nest.axes)
    for statement in part.point:
        waiting = list(values_of(statement))
        while waiting:
            item = waiting.pop()
            is_plain = item.loads and stored.isdisjoint(item.loads) and not any(map(is_named, nodes_of(item)))
            if is_plain and within.isdisjoint(item.atoms) and not any(isinstance(each, Data) for each in item.atoms):
                found.setdefault(item, Local.intern(f"{nest.axes[0].name}_const{len(found)}", item.dtype))
            else:
                waiting += item.under
    if not found:
        return (), part
    before = tuple(Let(local.name, value) for value, local in found.items())
    return before, replace(part, point=[with_values(statement, found) for statement in part.point])


def values_of(statement: Statement) -> tuple[Expr, ...]:
    match statement:
        case Let() | Store():
            return (statement.value,)
        case Update():
            return statement.values
    return ()


def is_named(item: Expr) -> bool:
    return isinstance(item, Local)


def nest_loops(nest: Nest, part: Parts, room: int | None) -> Body:
    """The loops of one nest inside a row."""
    body: Body = tuple(part.point)
    if nest.ordered:
        return scan_loops(nest, part, room) if nest.scans else plain_loops(nest, part)
    if not part.states:
        axes, body = collapse(ordered_axes(nest.axes, indices_at(body)), body)
        return blocked(axes, body, "vector", room)[0] + tuple(part.after)
    axes, body = reduction_axes(nest, body)
    body, room = blocked(axes, body, "reduction", room)
    whole: Body = (Accumulate(tuple(part.states), body), *part.after)
    outer, whole = collapse(list(nest.outer), whole)
    return blocked(outer, whole, "vector", room)[0]


def sorts(nest: Nest) -> bool:
    return any(
        isinstance(member.operation, Scan) and member.operation.combine.name == "sorted" for member in nest.members
    )


def scan_loops(nest: Nest, part: Parts, room: int | None) -> Body:
    """Prefixes along one axis, a block at a time; what a block comes to goes on to the next. What is sorted is one
    block."""
    (along,) = {member.operation.along for member in nest.members if isinstance(member.operation, Scan)}
    others = [item for item in nest.axes if item is not along]
    if sorts(nest):
        body, room = blocked([along], tuple(part.point), "sort", None)[0], 1
    else:
        body, room = blocked([along], tuple(part.point), "scan", room)
    whole: Body = (Accumulate(tuple(part.states), body), *part.after)
    outer, whole = collapse(others, whole)
    return blocked(outer, whole, "vector", room)[0]
