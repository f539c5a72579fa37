"""The place of the greatest of many values: first the block that has the greatest, then the place in that block.

The greatest values of blocks alone are found as fast as memory is read, and threads can share them; to move a place
along with each value takes far more. Only one block is read again.

Blocks are runs of what is reduced, in its order. The last one may begin inside the one before, which then is found
before it: so the first of equal values wins, and the first NaN, as without blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ferrite.ir import Expr, Index, axis, data, flat_extent, index_value, minimum, op, rewrite_indices
from ferrite.ir.program import Compute, Destination, Reduce, Store
from ferrite.machines import Machine
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.loops.reductions import EXTREME_OF


def block_size(operation: Reduce, side_by_side: bool, machine: Machine) -> int | None:
    """How far a block reaches along the first reduced axis; None where blocks do not pay, or nothing may be there.

    `side_by_side`: results are neighbours in memory. Then a block is read again in strides, which costs more.
    """
    extents = [likely(item.extent) for item in operation.reduced]
    if operation.destinations[1] is None or not all(item.extent.low for item in operation.reduced):
        return None
    many = math.prod(extents)
    if many < machine.min_argmax_values:
        return None
    first, *others = extents
    wanted = 2 ** round(math.log2(many) / 2 + (1 if side_by_side else 2))
    size = max(1, wanted // math.prod(others))
    return size if first >= machine.min_argmax_blocks * size else None


def by_blocks(
    operation: Reduce,
    size: int,
    side_by_side: bool,
    made: Callable[[Reduce, torch.dtype], Destination],
    loaded: Callable[[Destination], Expr],
) -> Iterator[Reduce | Compute]:
    """The operations instead of one; `made` is memory for the results of one, `loaded` reads it."""
    (value,), (best, place) = operation.values, operation.destinations
    first, *others = operation.reduced
    assert place is not None
    block = axis(f"{first.name}_block", (first.extent + (size - 1)) // size)
    inner = axis(f"{first.name}_rest", minimum(size, first.extent))

    def begin(index: Index) -> Index:
        return minimum(index * size, first.extent - inner.extent)

    def inside(index: Index) -> Reduce:
        values = (rewrite_indices(value, {first: begin(index) + inner}),)
        return replace(operation, reduced=(inner, *others), values=values)

    axes = (block, *operation.axes) if side_by_side else (*operation.axes, block)
    blocks = replace(inside(block), kind=EXTREME_OF[operation.kind], axes=axes)
    greatest = made(blocks, value.dtype)
    yield replace(blocks, destinations=(greatest,))
    chosen = made(operation, torch.int64)
    yield replace(operation, reduced=(block,), values=(loaded(greatest),), destinations=(None, chosen))
    found = data(loaded(chosen), block.extent)
    rest = made(operation, torch.int64)
    yield replace(inside(found), destinations=(best, rest))
    before = begin(found) * flat_extent(item.extent for item in others)
    total = op("add", index_value(before), loaded(rest))
    yield Compute(operation.axes, (Store(place.buffer, place.coordinates, total),), operation.origin)
