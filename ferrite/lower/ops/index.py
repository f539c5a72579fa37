"""Reading at places that come from memory: advanced indexing, gather, embedding, binary search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import (
    COMPLAINT,
    ONE,
    ZERO,
    Cast,
    Const,
    Data,
    Expr,
    Index,
    IndexValue,
    Op,
    arithmetic_type,
    cast,
    const,
    data,
    index_value,
    interval,
    masked,
    never_negative,
    number,
    op,
)
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import element_at
from ferrite.lower.ops.accumulate import scattered
from ferrite.lower.ops.concat import nothing
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.tables import worked_out
from ferrite.lower.ops.views import dim_of, flattened, put
from ferrite.lower.promotion import common_type
from ferrite.lower.stores import scatter_into
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
I64 = torch.int64
INTEGER_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
MASKS = (torch.bool, torch.uint8)


# What eager says of an index that points outside: it depends on the operator, and on the rank of what is read.
OUTSIDE = "IndexError: index {wrapped} is out of bounds for dimension %d with size {size}"
SELF = "IndexError: index out of range in self"
ALONG = "RuntimeError: index {index} is out of bounds for dimension %d with size {size}"
SELECTED = "RuntimeError: INDICES element is out of DATA bounds, id={index} axis_dim={size}"
FLAT = "IndexError: out of range: tried to access index {wrapped} on a tensor of {size} elements."


def checked(value: Expr, size: Index, complaint: str = COMPLAINT) -> Index:
    """A number from memory as an index below a size. Where all elements along it are one, or none, no loop would look
    at the number: eager does."""
    found = data(value, size, complaint)
    if isinstance(found, Data) and size.high is not None and size.high <= 1:
        raise NotLowered("an index into a dimension of one element at most")
    return found


def straight(value: Expr, size: Index, complaint: str = COMPLAINT) -> Index:
    """A number from memory as an index; a negative one is an error."""
    index_form = as_index_of(value)
    return checked(cast(value, I64) if index_form is None else index_value(index_form), size, complaint)


def as_index_of(value: Expr) -> Index | None:
    """Integer arithmetic on indices as an index, where no step of it can overflow."""
    plain = arithmetic_of(value)
    return worked_out(value) if plain is None else plain


def arithmetic_of(value: Expr) -> Index | None:
    match value:
        case Const() if value.dtype in INTEGER_TYPES:
            return number(value.value)
        case IndexValue() if value.dtype in INTEGER_TYPES:
            return fitting(value.index, value.dtype)
        case Cast() if value.dtype in INTEGER_TYPES:
            inner = arithmetic_of(value.arg)
            return None if inner is None else fitting(inner, value.dtype)
        case Op(name="add" | "sub" | "mul") if value.dtype in INTEGER_TYPES:
            left, right = map(arithmetic_of, value.operands)
            if left is None or right is None:
                return None
            result = left + right if value.name == "add" else left - right if value.name == "sub" else left * right
            return fitting(result, value.dtype)
    return None


def fitting(index: Index, dtype: torch.dtype) -> Index | None:
    """The index, if every value of it is one of the type."""
    limits = torch.iinfo(dtype)
    fits = index.low is not None and index.high is not None and limits.min <= index.low and index.high <= limits.max
    return index if fits else None


def wrapped(value: Expr, size: Index, complaint: str = COMPLAINT) -> Index:
    """A number from memory as an index, counted from the end where it is negative."""
    index_form, value = as_index_of(value), cast(value, I64)
    if index_form is not None and never_negative(index_form):
        return checked(index_value(index_form), size, complaint)
    if index_form is not None and index_form.high is not None and index_form.high < 0:
        return checked(index_value(index_form + size), size, complaint)
    between = interval(value)
    if between is not None and between[0] >= 0:
        return checked(value, size, complaint)
    negative = op("lt", value, const(0, I64), dtype=B8)
    return checked(op("where", negative, op("add", value, index_value(size)), value, dtype=I64), size, complaint)


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
                number = sum(other is not None for other in self.indices[:dim])  # eager counts indexed dimensions
                place[dim] = wrapped(value, self.x.sizes[dim], OUTSIDE % number)
        return place


def broadcast_sizes(shapes: Sequence[Sequence[Index]]) -> list[Index]:
    rank = max((len(shape) for shape in shapes), default=0)
    sizes: list[Index] = [ONE] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            sizes[dim] = size if sizes[dim] is ONE else sizes[dim]
    return sizes


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    picked = Picked(x, indices)
    return ctx.lazy(ctx.out_sizes, element_at(ctx, x, picked.place()), x.device)


@lowers(aten._unsafe_masked_index.default)
def unsafe_masked_index(ctx: Builder, x: Value, mask: Value, indices: Sequence[Value | None], fill: Any) -> Value:
    picked, sizes = Picked(x, indices), ctx.out_sizes
    chosen, other = ctx.elements(mask, sizes), cast(ctx.elements(fill, ()), x.dtype)
    return ctx.lazy(sizes, masked(chosen, x.at(picked.place()), other), x.device)


# --- along one dimension ----------------------------------------------------------------------------------------------


@lowers(aten.gather.default)
def gather(ctx: Builder, x: Value, dim: int, index: Value, sparse_grad: bool) -> Value:
    sizes = ctx.out_sizes
    if any(size is ZERO for size in sizes):
        return nothing(ctx)
    axes = own_axes(sizes)
    return ctx.lazy(sizes, element_at(ctx, x, along(x, dim, index.at(axes), axes)), x.device)


def along(x: Value, dim: int, index: Expr, axes: Sequence[Index]) -> list[Index]:
    """A place in `x` where one dimension is an index from memory."""
    if not x.rank:
        raise NotLowered("an index into a number: no loop would look at it")
    at = dim_of(dim, x.rank)
    return put(axes or [ZERO], at, straight(index, x.sizes[at], ALONG % at))


@lowers(aten.index_select.default)
def index_select(ctx: Builder, x: Value, dim: int, index: Value) -> Value:
    sizes = ctx.out_sizes
    if index.rank > 1 or not x.rank:
        raise NotLowered("indices that are no row, or into a number: eager says which it takes")
    at = dim_of(dim, x.rank)
    axes = own_axes(sizes)
    row = straight(index.at([axes[at]][: index.rank]), x.sizes[at], SELECTED if at == 1 else SELF)
    return ctx.lazy(sizes, element_at(ctx, x, put(axes, at, row)), x.device)


@lowers(aten.take.default)
def take(ctx: Builder, x: Value, index: Value) -> Value:
    sizes = ctx.out_sizes
    flat = flattened(x)
    return ctx.lazy(sizes, element_at(ctx, flat, [wrapped(ctx.elements(index, sizes), flat.sizes[0], FLAT)]), x.device)


# --- embedding --------------------------------------------------------------------------------------------------------


@lowers(aten.embedding.default)
def embedding(ctx: Builder, weight: Value, indices: Value, **hints: Any) -> Value:
    sizes = ctx.out_sizes
    axes = own_axes(sizes)
    row = straight(indices.at(axes[: indices.rank]), weight.sizes[0], SELF)
    return ctx.lazy(sizes, element_at(ctx, weight, [row, *axes[indices.rank :]]), weight.device)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: Builder,
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


eager(aten.embedding_renorm.default, because="rows that indices name are scaled, each once, however often it is named")


def counts(ctx: Builder, indices: Value, size: Index) -> Value:
    """How often each number below `size` is among the indices."""
    counted = ctx.fill((size,), 0, I64, indices.device)
    place = straight(indices.at(own_axes(indices.sizes)), size)
    scatter_into(ctx, counted, indices.sizes, [place], const(1, I64), "add")
    return counted


# --- binary search ----------------------------------------------------------------------------------------------------


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(ctx: Builder, x: Any, boundaries: Value, out_int32: bool, right: bool) -> Value:
    return searched(ctx, boundaries, x, right, None)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Builder, sorted_sequence: Value, x: Any, out_int32: bool, right: bool, side: str | None, sorter: Value | None
) -> Value:
    return searched(ctx, sorted_sequence, x, right or side == "right", sorter)


def searched(ctx: Builder, line: Value, x: Any, right: bool, sorter: Value | None) -> Value:
    sizes, common = ctx.out_sizes, common_type(line, x)
    row = [] if line.rank == 1 else list(own_axes(sizes)[: line.rank - 1])
    value = cast(cast(ctx.elements(x, sizes), common), arithmetic_type(common))
    if line.sizes[-1].high is None:
        return counted_before(ctx, line, value, right, row)
    found = number_before(line, value, right, row, sorter)
    return ctx.lazy(sizes, cast(found, ctx.out_dtype), line.device)


def counted_before(ctx: Builder, line: Value, value: Expr, right: bool, row: Sequence[Index]) -> Value:
    """One by one: of a line without a known bound, nobody knows how many steps a search takes."""

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        later = op("gt" if right else "ge", cast(line.at([*row, *inner]), value.dtype), value, dtype=B8)
        return cast(op("logical_not", later), I64)

    (found,) = add_reduce(ctx, "sum", ctx.out_sizes, line.sizes[-1:], [element], [ctx.out_dtype], line.device)
    assert found is not None
    return found


def number_before(
    line: Value, value: Expr, right: bool, row: Sequence[Index] = (), sorter: Value | None = None
) -> Expr:
    """How many elements of a sorted line come before a value: its bits, from the highest down."""
    count = line.sizes[-1]
    assert count.high is not None

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
