"""Reading at places that come from memory: advanced indexing, gather, embedding, binary search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.ir.division import never_negative
from ferrite.ir.expr import Const, Expr, IndexValue, cast, const, data, index_value, masked, op
from ferrite.ir.index import ONE, ZERO, Index, number
from ferrite.ir.types import arithmetic_type
from ferrite.lower.context import Context
from ferrite.lower.ops.accumulate import scattered
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.joins import nothing
from ferrite.lower.ops.views import dim_of, flattened, put
from ferrite.lower.promotion import common_type
from ferrite.lower.table import NotLowered, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
I64 = torch.int64
MASKS = (torch.bool, torch.uint8)


def straight(value: Expr, size: Index) -> Index:
    """A number from memory as an index; a negative one is an error."""
    return data(cast(value, I64), size)


def wrapped(value: Expr, size: Index) -> Index:
    """A number from memory as an index, counted from the end where it is negative."""
    value = cast(value, I64)
    if isinstance(value, Const | IndexValue):
        index = number(value.value) if isinstance(value, Const) else value.index
        if never_negative(index):
            return data(value, size)
        if index.high is not None and index.high < 0:
            return data(index_value(index + size), size)
    negative = op("lt", value, const(0, I64), dtype=B8)
    return data(op("where", negative, op("add", value, index_value(size)), value, dtype=I64), size)


# --- advanced indexing ------------------------------------------------------------------------------------------------


class Picked:
    """x[i, :, j]: the sizes of what indices pick, and where in `x` each element of it lies."""

    def __init__(self, x: Value, indices: Sequence[Value | None]) -> None:
        given = [*indices, *[None] * (x.rank - len(indices))]
        for each in given:
            if each is not None and each.dtype in MASKS:
                raise NotLowered("a mask as an index: how many elements it picks is known only when it runs")
            if each is not None and each.device != x.device:
                raise NotLowered("an index on another device")
        self.x, self.indices = x, given
        dims = [dim for dim, each in enumerate(given) if each is not None]
        together = dims == list(range(dims[0], dims[-1] + 1))
        kept = [dim for dim in range(x.rank) if dim not in dims]
        self.before = [dim for dim in kept if together and dim < dims[0]]
        self.after = [dim for dim in kept if dim not in self.before]
        self.shape = broadcast_sizes([each.sizes for each in given if each is not None])
        self.sizes = [*(x.sizes[dim] for dim in self.before), *self.shape, *(x.sizes[dim] for dim in self.after)]

    def place(self, mask: Expr | None = None) -> list[Index]:
        """Where in `x`, over the axes of the sizes. Indices that a mask leaves out do not matter."""
        axes = own_axes(self.sizes)
        first, last = len(self.before), len(self.before) + len(self.shape)
        place: list[Index] = [ZERO] * self.x.rank
        for dim, item in zip((*self.before, *self.after), (*axes[:first], *axes[last:]), strict=True):
            place[dim] = item
        for dim, each in enumerate(self.indices):
            if each is not None:
                own = axes[last - each.rank : last]
                value = each.at([ZERO if size is ONE else item for size, item in zip(each.sizes, own, strict=True)])
                if mask is not None:
                    value = op("where", mask, cast(value, I64), const(0, I64), dtype=I64)
                place[dim] = wrapped(value, self.x.sizes[dim])
        return place


def broadcast_sizes(shapes: Sequence[Sequence[Index]]) -> list[Index]:
    rank = max((len(shape) for shape in shapes), default=0)
    sizes: list[Index] = [ONE] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            sizes[dim] = size if sizes[dim] is ONE else sizes[dim]
    return sizes


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    picked = Picked(x, indices)
    return ctx.lazy(ctx.out_sizes, x.at(picked.place()), x.device)


@lowers(aten._unsafe_masked_index.default)
def unsafe_masked_index(ctx: Context, x: Value, mask: Value, indices: Sequence[Value | None], fill: Any) -> Value:
    picked, sizes = Picked(x, indices), ctx.out_sizes
    chosen, other = ctx.elements(mask, sizes), cast(ctx.elements(fill, ()), x.dtype)
    return ctx.lazy(sizes, masked(chosen, x.at(picked.place()), other), x.device)


# --- along one dimension ----------------------------------------------------------------------------------------------


@lowers(aten.gather.default)
def gather(ctx: Context, x: Value, dim: int, index: Value, sparse_grad: bool) -> Value:
    sizes = ctx.out_sizes
    if any(size is ZERO for size in sizes):
        return nothing(ctx)
    axes = own_axes(sizes)
    return ctx.lazy(sizes, x.at(along(x, dim, index.at(axes), axes)), x.device)


def along(x: Value, dim: int, index: Expr, axes: Sequence[Index]) -> list[Index]:
    """A place in `x` where one dimension is an index from memory; what has no dimension counts as one element."""
    if not x.rank:
        return []
    at = dim_of(dim, x.rank)
    return put(axes or [ZERO], at, straight(index, x.sizes[at]))


@lowers(aten.index_select.default)
def index_select(ctx: Context, x: Value, dim: int, index: Value) -> Value:
    sizes = ctx.out_sizes
    if not x.rank:
        return ctx.lazy(sizes, x.at([]), x.device)
    at = dim_of(dim, x.rank)
    axes = own_axes(sizes)
    return ctx.lazy(sizes, x.at(put(axes, at, straight(index.at([axes[at]][: index.rank]), x.sizes[at]))), x.device)


@lowers(aten.take.default)
def take(ctx: Context, x: Value, index: Value) -> Value:
    sizes = ctx.out_sizes
    flat = flattened(x)
    return ctx.lazy(sizes, flat.at([wrapped(ctx.elements(index, sizes), flat.sizes[0])]), x.device)


# --- embedding --------------------------------------------------------------------------------------------------------


@lowers(aten.embedding.default)
def embedding(ctx: Context, weight: Value, indices: Value, **hints: Any) -> Value:
    sizes = ctx.out_sizes
    axes = own_axes(sizes)
    row = straight(indices.at(axes[: indices.rank]), weight.sizes[0])
    return ctx.lazy(sizes, weight.at([row, *axes[indices.rank :]]), weight.device)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: Context,
    grad_output: Value,
    indices: Value,
    num_weights: Index | int,
    padding_idx: Index | int,
    scale_grad_by_freq: bool,
) -> Value:
    """Every row of the gradient adds itself to the row of the table it came from."""
    points = grad_output.sizes
    axes = own_axes(points)
    wide = arithmetic_type(ctx.out_dtype)
    rows, row = ctx.index(num_weights), cast(indices.at(axes[: indices.rank]), I64)
    source = cast(grad_output.at(axes), wide)
    if scale_grad_by_freq:
        source = op("div", source, cast(counts(ctx, indices, rows).at([straight(row, rows)]), wide))
    padding = ctx.index(padding_idx)
    if padding.high is None or padding.high >= 0:
        here = op("eq", row, index_value(padding), dtype=B8)
        source = op("where", here, const(0, wide), source, dtype=wide)
    return scattered(ctx, points, [straight(row, rows), *axes[indices.rank :]], source)


def counts(ctx: Context, indices: Value, size: Index) -> Value:
    """How often each number below `size` is among the indices."""
    counted = ctx.fill((size,), 0, I64, indices.device)
    place = straight(indices.at(own_axes(indices.sizes)), size)
    ctx.scatter(counted, indices.sizes, [place], const(1, I64), "add")
    return counted


# --- binary search ----------------------------------------------------------------------------------------------------


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(ctx: Context, x: Any, boundaries: Value, out_int32: bool, right: bool) -> Value:
    return searched(ctx, boundaries, x, right, None)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Context, sorted_sequence: Value, x: Any, out_int32: bool, right: bool, side: str | None, sorter: Value | None
) -> Value:
    return searched(ctx, sorted_sequence, x, right or side == "right", sorter)


def searched(ctx: Context, line: Value, x: Any, right: bool, sorter: Value | None) -> Value:
    sizes, common = ctx.out_sizes, common_type(line, x)
    row = [] if line.rank == 1 else list(own_axes(sizes)[: line.rank - 1])
    found = number_before(line, cast(ctx.elements(x, sizes), common), right, row, sorter)
    return ctx.lazy(sizes, cast(found, ctx.out_dtype), line.device)


def number_before(
    line: Value, value: Expr, right: bool, row: Sequence[Index] = (), sorter: Value | None = None
) -> Expr:
    """How many elements of a sorted line come before a value: its bits, from the highest down."""
    count = line.sizes[-1]
    if count.high is None:
        raise NotLowered("a search among a number of elements that has no bound")

    def comes_before(place: Expr) -> Expr:
        at = data(op("sub", place, const(1, I64)), count)
        if sorter is not None:
            at = straight(sorter.at([*row, at]), count)
        element = cast(line.at([*row, at]), value.dtype)
        return op("logical_not", op("gt" if right else "ge", element, value, dtype=B8))

    found: Expr = const(0, I64)
    for bit in reversed(range(count.high.bit_length())):
        next_one = op("add", found, const(1 << bit, I64))
        exists = op("le", next_one, index_value(count), dtype=B8)
        goes = masked(exists, comes_before(next_one), const(False, B8))
        found = op("where", goes, next_one, found, dtype=I64)
    return found
