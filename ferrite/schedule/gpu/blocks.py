"""How many elements of each axis a program has at once, and how many warps share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.ir import Axis, Index
from ferrite.ir.kernel import Loop, LoopKind, Statement, walk
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.loops.axes import Body

WARP_THREADS = 32  # on any GPU that CUDA has run on
MAX_WARPS = 32  # of one program: as many as CUDA lets a block have


def power_above(count: int) -> int:
    """The smallest power of two that is not below a count."""
    return 1 << max(count - 1, 0).bit_length()


def power_below(count: int) -> int:
    """The greatest power of two that is not above a count."""
    return 1 << max(count.bit_length() - 1, 0)


def whole_lanes(extent: Index) -> int | None:
    """Lanes that hold an axis, however long it turns out to be; None where nothing bounds it."""
    return None if extent.high is None else power_above(max(extent.high, 1))


def whole_elements(axes: Sequence[Axis]) -> int | None:
    """Elements of a block that holds all of these axes."""
    lanes = [whole_lanes(item.extent) for item in axes]
    return None if None in lanes else math.prod(each for each in lanes if each is not None)


def likely_lanes(extent: Index, most: int) -> int:
    """Lanes for an axis, no more than are likely to be used."""
    return max(min(power_above(likely(extent)), most), 1)


def blocked(axes: Sequence[Axis], body: Body, kind: LoopKind, room: int | None) -> tuple[Body, int | None]:
    """Loops over axes, the last one innermost, whose blocks have `room` elements together, and the room that is left;
    without a limit, blocks that hold the axes."""
    for item in reversed(axes):
        if room is None:
            lanes = whole_lanes(item.extent) or 1
        else:
            lanes = likely_lanes(item.extent, room)
            room = max(room // lanes, 1)
        body = (Loop(item, kind, body, lanes),)
    return body, room


def elements_of(body: Body, around: int = 1) -> int:
    """Elements of the largest block."""
    most = around
    for statement in body:
        lanes = statement.lanes if isinstance(statement, Loop) else 1
        most = max(most, elements_of(inner_of(statement), around * lanes))
    return most


def inner_of(statement: Statement) -> Body:
    return getattr(statement, "body", ())


def warps_for(body: Body, machine: GpuMachine, thread_elements: int | None = None) -> int:
    """Few elements a thread where there are few; more where rows are reduced, and where a long one is kept. Or so many
    as it is told."""
    elements = elements_of(body)
    if thread_elements is not None:
        return min(max(power_below(elements // (WARP_THREADS * thread_elements)), 1), MAX_WARPS)
    reduces = any(loop.kind in ("reduction", "scan", "sort") for loop in loops_in(body))
    each = machine.row_elements if reduces else machine.thread_elements
    looped = any(loop.kind == "reduction" and whole_lanes(loop.axis.extent) != loop.lanes for loop in loops_in(body))
    if not looped and elements > (machine.max_row_elements if reduces else machine.max_flat_elements):
        each *= 2
    return min(max(power_below(elements // (WARP_THREADS * each)), 1), MAX_WARPS)


def smaller_until(lanes: int, count: int, programs: int) -> int:
    """Lanes for an axis of `count` elements, fewer where so many programs would not come together."""
    while lanes > 1 and count < lanes * programs:
        lanes //= 2
    return lanes


def loops_in(body: Body) -> list[Loop]:
    return [item for item in walk(body) if isinstance(item, Loop)]
