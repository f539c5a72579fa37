"""Rows of different lengths behind one another in one tensor: bags of embeddings, and jagged tensors.

Offsets say where each bag begins; a running count of those that have begun says which bag a row belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import Expr, Index, arithmetic_type, cast, const, data, index_value, masked, op
from ferrite.ir.program import Combine
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce, add_scan
from ferrite.lower.ops.accumulate import scattered
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.index import I64, counts, straight
from ferrite.lower.stores import scatter_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2  # torch's numbers
BAD_OFFSETS = "RuntimeError: offsets[0] has to be 0, and offsets[-1] can not be greater than the number of rows"
NOT_IN_TABLE = "RuntimeError: input takes value {index} which is not in the valid range [0, {size})"


def bag_numbers(ctx: Builder, offsets: Value, count: Index) -> Value:
    """For each of `count` rows, the number of the bag it lies in: how many bags have begun by then, less one."""
    begun = ctx.fill((count + 1,), 0, I64, offsets.device)  # the last place is for bags behind the last row
    axes = own_axes(offsets.sizes)
    offset = cast(offsets.at(axes), I64)
    # the first bag begins at the first row: another beginning is none
    first = op("eq", index_value(axes[0]), const(0, I64), dtype=B8)
    late = op("logical_and", first, op("ne", offset, const(0, I64), dtype=B8))
    place = straight(op("where", late, const(-1, I64), offset, dtype=I64), count + 1, BAD_OFFSETS)
    scatter_into(ctx, begun, offsets.sizes, [place], const(1, I64), "add")
    (seen,) = add_scan(ctx, Combine("sum"), (count + 1,), 0, [begun.at(own_axes((count + 1,)))], [I64], offsets.device)
    assert seen is not None
    return ctx.lazy((count,), op("sub", seen.at(own_axes((count,))), const(1, I64)), offsets.device)


class Bags:
    """The rows of bags: which row of the table each is, and which bag it belongs to."""

    def __init__(self, ctx: Builder, indices: Value, offsets: Value, bags: Index, padding: int) -> None:
        self.indices, self.count, self.padding, self.bags = indices, indices.sizes[0], padding, bags
        self.number = bag_numbers(ctx, offsets, self.count)

    def bag(self, row: Index) -> Index:
        return straight(self.number.at([row]), self.bags)

    def counted(self, row: Index, value: Expr) -> Expr:
        """The value, or zero for a row that is padding."""
        if self.padding < 0:
            return value
        pads = op("eq", cast(self.indices.at([row]), I64), const(self.padding, I64), dtype=B8)
        return op("where", pads, const(0, value.dtype), value, dtype=value.dtype)

    def sizes(self, ctx: Builder) -> Value:
        """How many rows each bag has, padding left out."""
        counted = ctx.fill((self.bags,), 0, I64, self.indices.device)
        (row,) = own_axes((self.count,))
        scatter_into(ctx, counted, (self.count,), [self.bag(row)], self.counted(row, const(1, I64)), "add")
        return counted


def bag_count(offsets: Value, with_last: bool) -> Index:
    return offsets.sizes[0] - 1 if with_last else offsets.sizes[0]


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: Builder, weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: Value | None, include_last_offset: bool, padding_idx: int,
) -> tuple[Value, ...]:  # fmt: skip
    if mode == MAX:
        raise NotLowered("the greatest of a bag, and where it was")
    fakes, dtype = ctx.out, arithmetic_type(weight.dtype)
    bags = Bags(ctx, indices, offsets, bag_count(offsets, include_last_offset), padding_idx)
    points = (bags.count, weight.sizes[1])
    row, column = own_axes(points)
    source = cast(weight.at([straight(indices.at([row]), weight.sizes[0], NOT_IN_TABLE), column]), dtype)
    if per_sample_weights is not None:
        source = op("mul", source, cast(per_sample_weights.at([row]), dtype))
    ctx.out = fakes[0]
    result = scattered(ctx, points, [bags.bag(row), column], bags.counted(row, source))
    ctx.out = fakes
    lengths = bags.sizes(ctx) if mode == MEAN else None
    if lengths is not None:
        axes = own_axes(result.sizes)
        many = cast(op("maximum", lengths.at(axes[:1]), const(1, I64)), dtype)
        mean = op("div", cast(result.at(axes), dtype), many)
        result = ctx.lazy(result.sizes, cast(mean, weight.dtype), weight.device)
    return result, *(
        noted(ctx, fake, value) for fake, value in zip(fakes[1:], (bags.number, lengths, lengths), strict=True)
    )


def noted(ctx: Builder, fake: torch.Tensor, value: Value | None) -> Value:
    """What eager notes for the backward pass: a value, or zeros where it notes nothing."""
    sizes = ctx.shape(fake)
    if value is not None and value.sizes == sizes:
        return ctx.convert(value.view(value.sizes, own_axes(value.sizes)), fake.dtype)
    return ctx.fill(sizes, 0, fake.dtype, fake.device)


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    ctx: Builder, grad: Value, indices: Value, offsets: Value, num_weights: Index | int, scale_grad_by_freq: bool,
    mode: int, sparse: bool, per_sample_weights: Value | None, padding_idx: int, **noted: Any,
) -> Value:  # fmt: skip
    if mode == MAX or sparse:
        raise NotLowered("a sparse gradient" if sparse else "the greatest of a bag, and where it was")
    dtype, table = arithmetic_type(ctx.out_dtype), ctx.index(num_weights)
    bags = Bags(ctx, indices, offsets, grad.sizes[0], padding_idx)
    points = (bags.count, grad.sizes[1])
    row, column = own_axes(points)
    source = cast(grad.at([bags.bag(row), column]), dtype)
    if mode == MEAN:
        source = op("div", source, cast(bags.sizes(ctx).at([bags.bag(row)]), dtype))
    if per_sample_weights is not None:
        source = op("mul", source, cast(per_sample_weights.at([row]), dtype))
    if scale_grad_by_freq:
        source = op("div", source, cast(counts(ctx, indices, table).at([straight(indices.at([row]), table)]), dtype))
    return scattered(ctx, points, [straight(indices.at([row]), table), column], bags.counted(row, source))


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    ctx: Builder,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int,
) -> Value:
    if mode != SUM:
        raise NotLowered("weights of samples in another mode than a sum")
    bags = Bags(ctx, indices, offsets, grad.sizes[0], padding_idx)
    wide = arithmetic_type(ctx.out_dtype)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        row, (column,) = outer[0], inner
        table = weight.at([straight(indices.at([row]), weight.sizes[0], NOT_IN_TABLE), column])
        product = op("mul", cast(grad.at([bags.bag(row), column]), wide), cast(table, wide))
        return bags.counted(row, product)

    (result,) = add_reduce(ctx, "sum", indices.sizes, (grad.sizes[1],), [element], [ctx.out_dtype], grad.device)
    assert result is not None
    return result


# --- jagged tensors ---------------------------------------------------------------------------------------------------


@lowers(aten._jagged_to_padded_dense_forward.default)
def jagged_to_padded(
    ctx: Builder, values: Value, offsets: Sequence[Value], max_lengths: Any, padding_value: float
) -> Value:
    """Down the levels: where a row begins, and whether it is long enough."""
    sizes = ctx.out_sizes
    axes = own_axes(sizes)
    place: Expr = index_value(axes[0])
    other, conditions = cast(ctx.elements(padding_value, ()), values.dtype), list[Expr]()
    for level, item in zip(offsets, axes[1 : 1 + len(offsets)], strict=True):
        begin = cast(level.at([data(place, level.sizes[0])]), I64)
        end = cast(level.at([data(op("add", place, const(1, I64)), level.sizes[0])]), I64)
        place = op("add", begin, index_value(item))
        conditions.append(op("lt", place, end, dtype=B8))
    expr = values.at([data(place, values.sizes[0]), *axes[1 + len(offsets) :]])
    for condition in reversed(conditions):
        expr = masked(condition, expr, other)
    return ctx.lazy(sizes, expr, values.device)


@lowers(aten._padded_dense_to_jagged_forward.default)
def padded_to_jagged(ctx: Builder, dense: Value, offsets: Sequence[Value], total_L: Any) -> Value:
    """Up the levels: which row an element lies in, and how far from its beginning. One too far is an error."""
    sizes = ctx.out_sizes
    first, *rest = own_axes(sizes)
    row, count = index_value(first), sizes[0]
    place: list[Index] = []
    for level, size in zip(reversed(offsets), reversed(dense.sizes[1 : 1 + len(offsets)]), strict=True):
        bag = bag_numbers(ctx, level, count).at([data(row, count)])
        begin = cast(level.at([data(bag, level.sizes[0])]), I64)
        place.insert(0, data(op("sub", row, begin), size))
        row, count = bag, level.sizes[0] - 1
    return ctx.lazy(sizes, dense.at([data(row, count), *place, *rest]), dense.device)
