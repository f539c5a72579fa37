"""What steps of a plan move and compute, at the sizes seen: for the roofline picture, not for decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ferrite.errors import NotScheduled
from ferrite.ir import Op, nodes_of
from ferrite.ir.program import Operation, Reduce, Scan, axes_of, reads, roots_of, writes
from ferrite.schedule import BufferTable, bytes_at, size_at

Hints = Mapping[str, int]


def points_of(operation: Operation, hints: Hints) -> int:
    return math.prod(size_at(axis.extent, hints) for axis in axes_of(operation))


def flops_of(operations: Iterable[Operation], hints: Hints) -> int | None:
    """Operators on numbers, of whatever cost, and additions of reductions; None where sizes are not known."""
    try:
        return sum(points_of(each, hints) * work_at_point(each) for each in operations)
    except NotScheduled:
        return None


def work_at_point(operation: Operation) -> int:
    found = sum(isinstance(item, Op) for item in nodes_of(*roots_of(operation)))
    return found + isinstance(operation, Reduce | Scan)


def bytes_moved(operations: Iterable[Operation], table: BufferTable, outside: set[str], hints: Hints) -> int | None:
    """Of storages outside of a kernel, each read once and written once. Of one that is read at places that data says,
    no more than there are points."""
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    try:
        for operation in operations:
            points = points_of(operation, hints) if axes_of(operation) else None
            for accesses, found in ((reads(operation), read), (writes(operation), written)):
                for access in accesses:
                    storage = table.buffers[access.buffer].storage
                    if storage in outside:
                        most = bytes_at(table.buffers[storage], hints)
                        size = table.buffers[access.buffer].dtype.itemsize
                        many = most if points is None or access.coordinates is None else min(most, points * size)
                        found[storage] = min(most, max(found.get(storage, 0), many))
    except NotScheduled:
        return None
    return sum(read.values()) + sum(written.values())
