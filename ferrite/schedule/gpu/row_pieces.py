"""Rows of a tensor whose columns are reduced in pieces, cut into the same pieces.

A layer norm's gradient is made row by row, those of its weights are sums of columns of the same tensors. Where the
operations on rows count them as pieces and rows of a piece too, all of it can be one kernel: a program goes through
the rows of a piece, and keeps what its columns have come to. So can be what is computed element by element, and the
sums of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ferrite.ir import Axis, Index, Number, axis
from ferrite.ir.program import Compute, Operation, Reduce, axes_of
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, likely, likely_points
from ferrite.schedule.fusion.members import with_indices

Dimension = tuple[str, int]  # of a buffer


def related(seed: Reduce, along: Axis, operations: Sequence[Operation], table: BufferTable) -> dict[int, Axis]:
    """The operations that go along the same rows as a column reduction does along one of its axes, by their places,
    each with its axis of them: they access memory that it reads, or that another of them accesses, at the same place
    of the same dimension. Other column reductions are among them."""
    accesses = {
        place: table.accesses(operation)
        for place, operation in enumerate(operations)
        if isinstance(operation, Compute | Reduce)
    }
    by_buffer: dict[str, list[int]] = {}
    for place, touched in accesses.items():
        for access in touched:
            by_buffer.setdefault(access.buffer, []).append(place)
    found: dict[int, Axis] = {}
    rows: set[Dimension] = set()
    todo = dimensions(table.accesses(seed), along)
    while todo:
        dimension = todo.pop()
        if dimension in rows:
            continue
        rows.add(dimension)
        for place in by_buffer.get(dimension[0], ()):
            item = None if place in found else axis_at(dimension, accesses[place])
            if item is not None and item.extent is along.extent:
                found[place] = item
                todo += dimensions(accesses[place], item)
    return found


def dimensions(accesses: Iterable[MemoryAccess], item: Axis) -> list[Dimension]:
    """Where an axis stands alone."""
    return [
        (access.buffer, place)
        for access in accesses
        for place, coordinate in enumerate(access.coordinates)
        if coordinate is item
    ]


def axis_at(dimension: Dimension, accesses: Iterable[MemoryAccess]) -> Axis | None:
    """The one axis that stands in a dimension of a buffer in every access to it."""
    buffer, place = dimension
    found = {access.coordinates[place] for access in accesses if access.buffer == buffer}
    only = found.pop() if len(found) == 1 else None
    return only if isinstance(only, Axis) else None


@dataclass(frozen=True)
class Cut:
    """How the rows that a column reduction goes through are shared: programs have one value each of the axes `whole`,
    and one of `pieces` of the axis `along`."""

    whole: tuple[Axis, ...]
    along: Axis
    pieces: int


def cut_of(reduced: Sequence[Axis], wanted: int, min_rows: int) -> Cut | None:
    """About so many equal parts, of `min_rows` at least; `reduced`: from the slowest axis in memory to the fastest."""
    *outer, along = reduced
    if not all(isinstance(item.extent, Number) for item in reduced):
        return None
    count = likely_points(outer)
    length = likely(along.extent)
    if count > 4 * wanted or count * length < min_rows * wanted // 4:
        return None
    near = [pieces for pieces in range(1, length // min_rows + 1) if length % pieces == 0]
    pieces = min(near, key=lambda pieces: abs(math.log(count * pieces / wanted)), default=0)
    if not pieces or not wanted // 2 <= count * pieces <= 4 * wanted:
        return None
    return Cut(tuple(outer), along, pieces)


def is_reduced(operation: Operation, item: Axis) -> bool:
    return isinstance(operation, Reduce) and item in operation.reduced


# --- other axes -------------------------------------------------------------------------------------------------------


def in_pieces(operation: Operation, item: Axis, pieces: int) -> Operation:
    """The operation with an axis as equal pieces, and the places in one."""
    if pieces == 1:
        return operation
    assert isinstance(item.extent, Number)
    taken = {each.name for each in axes_of(operation)}
    names = [f"{item.name}_{part}" for part in ("piece", "rest")]
    while not taken.isdisjoint(names):
        names = [f"{name}_" for name in names]
    outer, inner = axis(names[0], pieces), axis(names[1], item.extent.value // pieces)
    new: Mapping[Axis, Index] = {item: outer * inner.extent + inner}

    def over(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(part for each in axes for part in ((outer, inner) if each is item else (each,)))

    return with_indices(operation, new, over) if isinstance(operation, (Compute, Reduce)) else operation
