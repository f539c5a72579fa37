"""Convolutions: sums over channels and the taps of a window, of elements of an image times those of a weight.

    y[n, c, h, w] = sum over k, i, j of   x[n, k, h * stride + i, w * stride + j] * weight[c, k, i, j]

In: a reduction that `convolution_of` knows, alone or with operations behind it at the same points. It is a matrix
product with a row for each place of the result and a column for each of its channels, of which the left factor is never
made: a row of it is where a window begins in the image, and the loops over taps and channels go on from there.
`ferrite.schedule.cpu.convolution_loops` makes the loops.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ferrite.errors import Refusal
from ferrite.ir import Axis, Expr, FloorDiv, Load, Number, Op, data_of, sum_pieces
from ferrite.ir.program import Compute, Operation, Reduce
from ferrite.schedule.cpu.products import MIN_SIDE, axes_of_load, extent_of, product_of
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member


@dataclass(frozen=True)
class Convolution:
    """`places`: the axes that only the image has; `channels`: the one that only the weight has; `batch`: those that
    both have, as groups; `summed`: those that are no axes of the result; `together`: of how many channels the image is
    the same, where not of all."""

    batch: tuple[Axis, ...]
    places: tuple[Axis, ...]
    channels: Axis
    summed: tuple[Axis, ...]
    together: int | None = None


def convolution_of(operation: Operation) -> Convolution | None:
    """The axes of an operation that is a convolution, of sizes that are known, and no matrix product."""
    if not isinstance(operation, Reduce) or operation.kind != "sum" or not operation.reduced:
        return None
    (value,) = operation.values
    if not isinstance(value, Op) or value.name != "mul" or value.dtype not in (torch.float32, torch.float64):
        return None
    one, other = value.operands
    if not isinstance(one, Load) or not isinstance(other, Load) or product_of(operation) is not None:
        return None
    with_one, with_other = axes_of_load(one), axes_of_load(other)
    together = channels_together(operation.axes, (one, with_one), (other, with_other))
    sides = [
        tuple(item for item in operation.axes if item in mine and item not in its)
        for mine, its in ((with_one, with_other), (with_other, with_one))
    ]
    # the channels of a result come before its places: where either side has a single axis, this tells them apart
    single = [side for side in sides if len(side) == 1]
    if not all(sides) or not single or not set(operation.reduced) <= with_one & with_other:
        return None
    if not all(isinstance(item.extent, Number) for item in (*operation.axes, *operation.reduced)):
        return None
    (channels,) = min(single, key=lambda side: operation.axes.index(side[0]))
    places = next(side for side in sides if side != (channels,))
    batch = tuple(item for item in operation.axes if item is not channels and item not in places)
    if min(together or extent_of(channels), math.prod(map(extent_of, places))) < MIN_SIDE:
        return None
    if not sum_pieces.windows_can_be_cut([extent_of(item) for item in operation.reduced]):
        return None
    return Convolution(batch, places, channels, operation.reduced, together)


def channels_together(axes: Sequence[Axis], *factors: tuple[Load, set[Axis]]) -> int | None:
    """How many channels there are in a group, where an image has a part for each group; its axes then are without the
    channels."""
    (_, with_one), (_, with_other) = factors
    for item in axes:
        if item in with_one and item in with_other:
            for load, its in factors:
                size = read_alike(load, item)
                if size is not None and isinstance(item.extent, Number) and item.extent.value % size == 0:
                    its.remove(item)
                    return size
    return None


def read_alike(load: Load, item: Axis) -> int | None:
    """At how many neighbouring places of an axis the same is read: what its quotient says alone."""
    found, waiting = set(), list(load.coordinates)
    if any(map(data_of, waiting)):
        return None
    while waiting:
        index = waiting.pop()
        if index is item:
            return None
        if isinstance(index, FloorDiv) and index.top is item and isinstance(index.bottom, Number):
            found.add(index.bottom.value)
        else:
            waiting += index.parts
    return found.pop() if len(found) == 1 else None


def factors_of(value: Expr, convolution: Convolution) -> tuple[Load, Load]:
    """The image and the weight in a product of both."""
    one, other = value.args
    assert isinstance(one, Load)
    assert isinstance(other, Load)
    return (one, other) if convolution.places[0] in axes_of_load(one) else (other, one)


# Of reductions: each is asked about with every group that it, or what follows it, might join.
_is_tiled: weakref.WeakKeyDictionary[Reduce, bool] = weakref.WeakKeyDictionary()


def is_tiled(operation: Operation) -> bool:
    """Whether an operation is a matrix product or a convolution, which both have tiles of sums."""
    if not isinstance(operation, Reduce):
        return False
    if (known := _is_tiled.get(operation)) is None:
        known = product_of(operation) is not None or convolution_of(operation) is not None
        _is_tiled[operation] = known
    return known


def reason_apart(group: Group, member: Member, rows: Sequence[Axis]) -> Refusal | None:
    """Why a member is in another kernel than a group, where one of them has a matrix product."""
    if is_tiled(member.operation):
        return Refusal("a matrix product begins a kernel of its own")
    if not is_tiled(group.members[0].operation):
        return None
    if tuple(rows) != group.rows or member.inner(rows) or not isinstance(member.operation, Compute):
        return Refusal("it is not at the points of the matrix product before it")
    if any(store.mode != "set" for store in member.operation.stores):
        return Refusal("it adds to memory behind a matrix product")
    return None
