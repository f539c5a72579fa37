"""Kernels in which every operation is at the same points: one block of them is a program.

flat      neighbouring axes joined into one; a program has `flat_block` elements of the last
spread    the last axis is short: a block of two axes; or, where blocks would be half empty, one axis for both,
          with a division for each element
tiled     some memory lies along one axis, some along another (a transposition): blocks of both, so that lines of
          either are whole
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import OPERATORS, Axis, Index, Load, Number, Op, axis, data_of, indices_of
from ferrite.ir.kernel import Loop, Store, nodes_in, walk
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of
from ferrite.schedule.gpu.blocks import likely_lanes, power_above, smaller_until
from ferrite.schedule.loops.axes import Body, collapse, indices_at, nested, replaced
from ferrite.schedule.loops.memory_order import crossing, ordered_axes


def flat(rows: Sequence[Axis], body: Body, machine: GpuMachine) -> Body:
    indices = indices_at(body)
    order = ordered_axes(rows, indices)
    across = crossing(order, indices, machine) if len(order) > 1 else None
    if across is not None:
        return tiled(order, across, body, machine)
    axes, body = collapse(order, body, divided=True)
    if not axes:
        return body
    room = block_elements(axes, body, machine)
    axes, body = without_waste(axes, body, room, machine.max_lanes_per_element)
    *outer, last = axes
    lanes = likely_lanes(last.extent, room)
    inner: Body = (Loop(last, "vector", body, lanes),)
    if outer and lanes < room:
        second = outer.pop()
        inner = (Loop(second, "vector", inner, likely_lanes(second.extent, room // lanes)),)
    return nested(outer, inner, "parallel")


def block_elements(axes: Sequence[Axis], body: Body, machine: GpuMachine) -> int:
    """How many a block has: fewer where work is heavy, or where there would be too few programs."""
    points = likely_points(axes)
    room = machine.flat_block
    if is_strided(body, axes[-1], machine):
        room = machine.window_block
    elif work_at_point(body) > machine.heavy_point_additions:
        room //= 2
    elif gathers(body):  # loads wait for loads: more of them at once
        room *= 2
    while room > machine.min_block_elements and points < room * machine.multiprocessors * 2:
        room //= 2
    return room


def is_strided(body: Body, last: Axis, machine: GpuMachine) -> bool:
    """Whether neighbours are loaded from places that are near, but not side by side: windows, every second element.
    With one element for each thread, what a warp loads is whole lines nevertheless."""
    loads = [item for statement in walk(body) for item in nodes_in(statement) if isinstance(item, Load)]
    steps = [step_of(item.coordinates[0], last) for item in loads]
    return any(isinstance(step, Number) and 1 < abs(step.value) <= machine.max_lane_step for step in steps)


def gathers(body: Body) -> bool:
    nodes = (item for statement in walk(body) for item in nodes_in(statement))
    return any(data_of(index) for item in nodes for index in indices_of(item))


def work_at_point(body: Body) -> int:
    nodes = {item for statement in walk(body) for item in nodes_in(statement)}
    return sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in nodes)


def without_waste(axes: list[Axis], body: Body, room: int, most: float) -> tuple[list[Axis], Body]:
    """Axes of which blocks have few lanes outside: where the last two have too many, the one before the last is joined
    with what is around it, which costs a division for each row of a block; or else the last two are one. `most`: lanes
    for each element."""
    while len(axes) > 1 and lanes_per_element(axes[-2:], room) > most:
        if len(axes) > 2 and lanes_per_element(axes[-1:], room) <= most and are_numbers(axes[-3:-1]):
            last = axes[-1]
            axes, body = one_axis(axes[:-1], body)
            axes = [*axes, last]
        elif are_numbers(axes[-2:]):
            axes, body = one_axis(axes, body)
        else:
            break
    return axes, body


def are_numbers(axes: Sequence[Axis]) -> bool:
    """Greater than zero: quotients are of them."""
    return all(isinstance(item.extent, Number) and item.extent.value > 0 for item in axes)


def lanes_per_element(axes: Sequence[Axis], room: int) -> float:
    """Lanes of the blocks of these axes, for each element; the last axis is innermost."""
    ratio = 1.0
    for item in reversed(axes):
        count = max(likely(item.extent), 1)
        lanes = min(power_above(count), room)
        room = max(room // lanes, 1)
        ratio *= -(-count // lanes) * lanes / count
    return ratio


def one_axis(axes: Sequence[Axis], body: Body) -> tuple[list[Axis], Body]:
    """The last two axes as one: places of either are quotients and remainders."""
    *outer, left, right = axes
    both = axis(f"{left.name}_{right.name}", left.extent * right.extent)
    places: dict[Axis, Index] = {left: both // right.extent, right: both % right.extent}
    return [*outer, both], replaced(body, places)


def tiled(order: Sequence[Axis], across: Axis, body: Body, machine: GpuMachine) -> Body:
    """The last of `order` lies side by side in most memory, `across` in some."""
    last = order[-1]
    outer = [item for item in order if item is not last and item is not across]
    outer, body = collapse(outer, body)
    side = max(machine.tile_bytes // smallest_type(body), 1)
    width, height = (likely_lanes(item.extent, side) for item in (last, across))
    others = likely_points(outer) * max(likely(last.extent) // width, 1)
    height = smaller_until(height, likely(across.extent) * others, machine.multiprocessors)
    inner: Body = (Loop(across, "vector", (Loop(last, "vector", body, width),), height),)
    return nested(outer, inner, "parallel")


def smallest_type(body: Body) -> int:
    """Bytes of an element of the narrowest memory that is touched."""
    found = [statement.value.dtype for statement in walk(body) if isinstance(statement, Store)]
    found += [item.dtype for statement in walk(body) for item in nodes_in(statement) if isinstance(item, Load)]
    return max(min((dtype.itemsize for dtype in found), default=4), 2)
