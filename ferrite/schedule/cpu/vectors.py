"""Loops for the vectors and the threads of a processor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ferrite.ir import Axis, IndexValue, Number
from ferrite.ir.kernel import Accumulate, Loop, LoopKind, When, nodes_in
from ferrite.machines import Machine
from ferrite.schedule.loops.axes import Body, nested, work_of


def types_of(body: Body) -> set[torch.dtype]:
    """The types that are computed with; integers that only index do not count."""
    found: set[torch.dtype] = set()
    for statement in body:
        for item in nodes_in(statement):
            if not isinstance(item, IndexValue) and item.dtype is not torch.bool:
                found.add(item.dtype)
        if isinstance(statement, Loop | Accumulate | When):
            found |= types_of(statement.body)
    return found


def unrolling(work: int, machine: Machine) -> int:
    """How many vectors side by side: enough to keep the units busy, few enough for the registers."""
    if work <= machine.light_point_additions:
        return 4
    return 2 if work <= machine.middling_point_additions else 1


def lanes_for(body: Body, machine: Machine) -> int:
    """Elements of a vector: as many as a register holds of what most is computed with. Wider types take several."""
    types = types_of(body)
    floats = {dtype for dtype in types if dtype.is_floating_point}
    if floats:
        return machine.vector_bytes // max(min(dtype.itemsize for dtype in floats), 4)
    return machine.lanes(*types)


def vector_loop(axis: Axis, body: Body, machine: Machine, kind: LoopKind = "vector") -> Loop:
    lanes = lanes_for(body, machine)
    copies = unrolling(work_of(body), machine)
    if kind == "reduction":
        copies = max(copies, 2)  # one addition waits for the other: more than one must be under way
    count = axis.extent
    if isinstance(count, Number):
        while lanes > 1 and count.value < lanes:
            lanes //= 2
        while copies > 1 and count.value < lanes * copies:
            copies //= 2
    return Loop(axis, kind, body, lanes, copies)


def rows_at_once(machine: Machine, points: int) -> int:
    """How many rows a thread should have at least, so that waking it pays."""
    return max(math.ceil(machine.grain / max(points, 1)), 1)


def shared(axes: Sequence[Axis], body: Body, work: int, machine: Machine) -> Body:
    """Loops that threads share; a thread gets several rounds of the innermost where one is little work."""
    if not axes:
        return body
    (inner,) = nested(axes[-1:], body, "parallel")
    assert isinstance(inner, Loop)
    copies = rows_at_once(machine, work)
    loop = Loop(inner.axis, "parallel", inner.body, copies=copies)
    return nested(axes[:-1], (loop,), "parallel")
