"""The next row comes from memory while a row that has come is gone through once more.

    for i0 in parallel(8192):                                  for i0 in parallel(8192):
        for i1 in reduction(1024):                                 for i1 in reduction(1024):
            ... x[1024*i0 + i1] ...                                    ... x[1024*i0 + i1] ...
        for i2 in reduction(1024):                  =>             for i2 in reduction(1024):
            ... x[1024*i0 + i2] ...                                    prefetch(x[1024*i0 + i2 + 1024])
                                                                       ... x[1024*i0 + i2] ...

A processor sees by itself what a loop reads next, but not what comes when all loops over a row are over: memory has
nothing to do meanwhile. Short rows come along with those before them, of long ones there is no room for two, and what
is small is in a cache already. Where the first loop writes to memory, too, memory is busy enough: on Arm, to ask for
more then took a third longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ferrite.ir import ONE, Axis, Index, Load, Number, substitute
from ferrite.ir.kernel import Accumulate, Loop, Pointer, Prefetch, Statement, Store, nodes_in, walk
from ferrite.machines import Machine
from ferrite.schedule.fusion.accesses import likely, step_of
from ferrite.schedule.loops.axes import Body


def with_prefetches(body: Body, pointers: Mapping[str, Pointer], machine: Machine) -> Body:
    return tuple(
        replace(item, body=in_loop(item, pointers, machine))
        if isinstance(item, Loop) and item.kind == "parallel"
        else item
        for item in body
    )


def in_loop(loop: Loop, pointers: Mapping[str, Pointer], machine: Machine) -> Body:
    if any(isinstance(item, Loop) and item.kind == "parallel" for item in loop.body):
        return with_prefetches(loop.body, pointers, machine)
    passes = [(place, found) for place, item in enumerate(loop.body) if (found := lane_loop(item)) is not None]
    if len(passes) < 2 or passes[0][1].axis.extent is not passes[1][1].axis.extent:
        return loop.body
    (_, first), (place, second) = passes[:2]
    if any(isinstance(item, Store) and item.buffer in pointers for item in walk(first.body)):
        return loop.body
    wanted = list(next_rows(loop.axis, first, second.axis, pointers, machine))
    if not 0 < len(wanted) <= machine.max_prefetched_rows:
        return loop.body
    new = with_loop(loop.body[place], replace(second, body=(*wanted, *second.body)))
    return (*loop.body[:place], new, *loop.body[place + 1 :])


def lane_loop(statement: Statement) -> Loop | None:
    """The loop that a statement is, or of which it is the states."""
    if isinstance(statement, Accumulate) and len(statement.body) == 1:
        (statement,) = statement.body
    return statement if isinstance(statement, Loop) and statement.lanes > 1 else None


def with_loop(statement: Statement, new: Loop) -> Statement:
    return replace(statement, body=(new,)) if isinstance(statement, Accumulate) else new


def next_rows(
    row: Axis, first: Loop, axis: Axis, pointers: Mapping[str, Pointer], machine: Machine
) -> Iterator[Prefetch]:
    """What the first loop reads along a row, one row later, over the axis of another loop."""
    found: dict[tuple[str, Index], None] = {}
    for statement in walk(first.body):
        for item in nodes_in(statement):
            if isinstance(item, Load) and item.buffer in pointers:
                found[item.buffer, item.coordinates[0]] = None
    for buffer, place in found:
        step, extent = step_of(place, row), first.axis.extent
        if step_of(place, first.axis) is not ONE or not isinstance(step, Number) or not isinstance(extent, Number):
            continue
        bytes_ = extent.value * pointers[buffer].dtype.itemsize
        far = step.value >= extent.value and machine.min_prefetch_bytes <= bytes_ <= machine.l2_bytes // 8
        if far and bytes_ * likely(row.extent) >= 2 * machine.l2_bytes:
            yield Prefetch(buffer, (substitute(place, {row: row + 1, first.axis: axis}),))
