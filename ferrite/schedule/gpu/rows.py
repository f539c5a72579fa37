"""Kernels with loops inside a row: reductions, with what comes before and after them.

kept      the rows are short enough that a program holds them in registers: every loop inside is one block. A program
          has one row, or several where rows are short
looped    longer rows: every loop inside goes through the row, a block at a time
columns   rows lie side by side in memory: a block is so many columns wide that lines are whole, and so many rows of
          what is reduced high
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import Axis
from ferrite.ir.kernel import Accumulate, Loop
from ferrite.ir.program import Scan
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely, likely_points
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.gpu.blocks import blocked, likely_lanes, power_above, power_below, smaller_until, whole_elements
from ferrite.schedule.gpu.flat import smallest_type
from ferrite.schedule.loops.axes import Body, collapse, indices_at, nested
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.plain_loops import plain_loops
from ferrite.schedule.loops.statements import Parts


def by_rows(
    rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine, kept: bool
) -> Body:
    """`kept`: every loop inside is one block."""
    count = likely_points(rows)
    if kept:
        blocks = [nest for nest in nests if nest.scans or not nest.ordered]
        elements = max((whole_elements(nest.axes) or 1 for nest in blocks), default=1)
        lanes = max(machine.rows_block // elements, 1)
        room = None
    else:
        lanes, room = 1, machine.row_step_elements
    lanes = smaller_until(lanes, count, machine.enough_programs)
    body = tiles
    for nest, part in zip(nests, parts, strict=True):
        body += nest_loops(nest, part, room)
    axes, body = collapse(list(rows), body)
    if not axes:
        return body
    lanes = min(lanes, power_above(likely(axes[-1].extent)))
    return nested(axes[:-1], (Loop(axes[-1], "vector", body, lanes),), "parallel")


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
    room = max(power_below(machine.step_elements // wide), 1)
    body: Body = ()
    for nest, part in zip(nests, parts, strict=True):
        body += nest_loops(nest, part, room)
    outer, body = collapse(others, body)
    return nested(outer, (Loop(column, "vector", body, wide),), "parallel")


def nest_loops(nest: Nest, part: Parts, room: int | None) -> Body:
    """The loops of one nest inside a row."""
    body: Body = tuple(part.point)
    if nest.ordered:
        return scan_loops(nest, part, room) if nest.scans else plain_loops(nest, part)
    if not part.states:
        axes, body = collapse(ordered_axes(nest.axes, indices_at(body)), body)
        return blocked(axes, body, "vector", room)[0] + tuple(part.after)
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(body)), body)
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
