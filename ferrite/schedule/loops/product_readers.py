"""What reads a matrix product as a tensor of more dimensions goes over its rows, as the product does.

    p = product(...)                            p[36, 40]
    for i in 2, j in 18, k in 40:               for row in 36, k in 40:
        y[i, j, k] = relu(p[18*i + j, k])   =>      y[row // 18, row % 18, k] = relu(p[row, k])

A linear layer on a batch of rows is one product between two views. What follows it is at other axes than the product
then, though it is at the same points; over one axis it is seen to be, and both are one kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from ferrite.ir import Axis, Index, axis
from ferrite.ir.program import Compute, Operation, Program
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, axes_in
from ferrite.schedule.fusion.members import with_indices
from ferrite.schedule.loops.axes import joinable


def with_whole_rows(program: Program, is_product: Callable[[Operation], bool]) -> Program:
    """`is_product`: whether an operation is a matrix product that the device arranges as one."""
    if not any(map(is_product, program.operations)):
        return program
    readers = _Readers(program, is_product)
    return replace(program, operations=tuple(map(readers.taken, program.operations)))


class _Readers:
    """`split`: what was written over such rows, and at which dimensions they are spread out there; None: at none."""

    def __init__(self, program: Program, is_product: Callable[[Operation], bool]) -> None:
        self.is_product = is_product
        self.buffer_table = BufferTable(program)
        self.split: dict[str, int | None] = {}

    def taken(self, operation: Operation) -> Operation:
        """The operation, over whole rows where it reads any."""
        if self.is_product(operation):
            self.split |= {access.buffer: None for access in self.accesses(operation) if access.writes}
            return operation
        if not isinstance(operation, Compute):
            return operation
        accesses = self.accesses(operation)
        pair = next((pair for access in accesses if not access.writes for pair in self.spread(access)), None)
        if pair is None or not joinable(*pair, [access.place for access in accesses]):
            return operation
        outer, inner = pair
        rows = axis(f"{outer.name}_{inner.name}", outer.extent * inner.extent)
        for access in accesses:
            if access.writes and (dimension := side_by_side(pair, access)) is not None:
                self.split[access.buffer] = dimension
        new: dict[Axis, Index] = {outer: rows // inner.extent, inner: rows % inner.extent}
        axes = tuple(rows if item is outer else item for item in operation.axes if item is not inner)
        return with_indices(operation, new, lambda old: axes)

    def accesses(self, operation: Operation) -> tuple[MemoryAccess, ...]:
        return self.buffer_table.accesses(operation)  # type: ignore[arg-type]

    def spread(self, access: MemoryAccess) -> Iterator[tuple[Axis, Axis]]:
        """The two axes that go over rows together."""
        if access.buffer not in self.split:
            return
        dimension = self.split[access.buffer]
        if dimension is not None:
            outer, inner = access.coordinates[dimension : dimension + 2]
            if isinstance(outer, Axis) and isinstance(inner, Axis):
                yield outer, inner
            return
        for index in access.coordinates:
            for outer, inner in itertools.permutations(sorted(axes_in(index), key=str), 2):
                if index is outer * inner.extent + inner:
                    yield outer, inner


def side_by_side(pair: tuple[Axis, Axis], access: MemoryAccess) -> int | None:
    """The dimension of the first of two axes, where the second is that of the next one."""
    pairs = zip(access.coordinates, access.coordinates[1:], strict=False)
    return next((place for place, found in enumerate(pairs) if found == pair), None)
