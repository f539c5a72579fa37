"""Writing at places that come from memory: index_put, scatter, index_add and their kind.

The result is a copy of the tensor, into which every source is stored at its place, or combined with what is there. The
in-place forms write to the tensor's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import (
    ONE,
    ZERO,
    Expr,
    Index,
    arithmetic_type,
    cast,
    const,
    data,
    index_value,
    is_integer,
    masked,
    number,
    op,
)
from ferrite.ir.program import Combine
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_scan
from ferrite.lower.memory import copied, wanted_strides
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.index import ALONG, FLAT, I64, MASKS, OUTSIDE, SELF, Picked, along, straight, wrapped
from ferrite.lower.ops.views import dim_of, flattened, put, reshaped, sliced, total
from ferrite.lower.stores import reads_elsewhere, scatter_into, write_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten


def copy_of(ctx: Builder, x: Value) -> Value:
    """A copy to write to, with the strides of the result; it is made when the first source is there."""
    copy = ctx.lazy(x.sizes, ctx.elements(x, x.sizes), x.device)
    copy.box.strides = wanted_strides(ctx, 0, x.sizes)
    return copy


def kept_apart(ctx: Builder, index: Value, target: Value) -> Value:
    """Indices that lie in the memory about to be written are read first."""
    name = ctx.realise(target.box)
    expr = ctx.elements(index, index.sizes)
    return copied(ctx, index) if reads_elsewhere(ctx, expr, name, ()) else index


# --- index_put --------------------------------------------------------------------------------------------------------


@lowers(aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl.default)
def index_put(
    ctx: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool, unsafe: bool = False
) -> Value:
    if any(each is not None and each.dtype in MASKS for each in indices):
        return masked_put(ctx, x, indices, values, accumulate)
    picked = Picked(x, indices)
    copy = copy_of(ctx, x)
    put_at(ctx, copy, picked, values, accumulate)
    return copy


@lowers(aten.index_put_.default, aten._index_put_impl_.default)
def index_put_(
    ctx: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool, unsafe: bool = False
) -> Value:
    if any(each is not None and each.dtype in MASKS for each in indices):
        return write_into(ctx, x, masked_put(ctx, x, indices, values, accumulate))
    Picked(x, indices)  # what cannot be lowered says so before anything is written
    apart = [each if each is None else kept_apart(ctx, each, x) for each in indices]
    put_at(ctx, x, Picked(x, apart), values, accumulate)
    return x


def put_at(ctx: Builder, target: Value, picked: Picked, values: Value, accumulate: bool) -> None:
    source = cast(ctx.elements(values, picked.sizes), target.dtype)
    scatter_into(ctx, target, picked.sizes, picked.place(), source, "add" if accumulate else "set")


def masked_put(ctx: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    """x[mask] = values, where the values are the same for every element that the mask picks."""
    masks = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    (dim, mask), many = masks[0], len(masks)
    after = x.rank - dim - mask.rank
    if many > 1 or mask.device != x.device:
        raise NotLowered("a mask among other indices: how many elements it picks is known only when it runs")
    if mask.dtype is not B8 or mask.sizes != x.sizes[dim : dim + mask.rank]:
        raise NotLowered("a mask of another type or size: eager says whether it may be one")
    if values.rank > after and values.sizes[values.rank - after - 1] is not ONE:
        raise NotLowered("values for the elements that a mask picks: how many is known only when it runs")
    axes = own_axes(x.sizes)
    places = [*axes[:dim], ZERO, *axes[dim + mask.rank :]]
    place = [
        ZERO if size is ONE else item
        for size, item in zip(values.sizes, places[len(places) - values.rank :], strict=True)
    ]
    wide = arithmetic_type(x.dtype)
    old, new = x.at(axes), cast(values.at(place), x.dtype)
    if accumulate:
        new = cast(op("logical_or" if x.dtype is B8 else "add", cast(old, wide), cast(new, wide)), x.dtype)
    chosen = cast(mask.at(axes[dim : dim + mask.rank]), B8)
    return ctx.lazy(x.sizes, op("where", chosen, new, old, dtype=x.dtype), x.device)


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(
    ctx: Builder, x: Value, mask: Value, indices: Sequence[Value | None], values: Value
) -> Value:
    picked = Picked(x, indices)
    chosen = ctx.elements(mask, picked.sizes)
    source = cast(ctx.elements(values, picked.sizes), x.dtype)
    copy = copy_of(ctx, x)
    kept = op("where", chosen, source, const(0, x.dtype), dtype=x.dtype)
    scatter_into(ctx, copy, picked.sizes, picked.place(chosen), kept, "add")
    return copy


# --- scatter ----------------------------------------------------------------------------------------------------------

MODES = {"add": "add", "sum": "add", "mean": "add", "multiply": "mul", "prod": "mul", "amax": "amax", "amin": "amin"}


class Sources:
    """What is stored where: a source at every point of some sizes, and its place in the target."""

    def __init__(self, points: Sequence[Index], place: Sequence[Index], source: Expr) -> None:
        self.points, self.place, self.source = tuple(points), place, source

    def store(self, ctx: Builder, target: Value, mode: str, source: Expr | None = None) -> None:
        value = cast(self.source if source is None else source, target.dtype)
        scatter_into(ctx, target, self.points, self.place, value, mode)


def scatter_sources(ctx: Builder, x: Value, dim: int, index: Value, src: Any) -> Sources:
    axes = own_axes(index.sizes)
    if any(size is ZERO for size in index.sizes):
        return Sources(index.sizes, [ZERO] * x.rank, const(0, x.dtype))
    value = src.at([*axes, ZERO][: src.rank]) if isinstance(src, Value) else ctx.elements(src, ())
    return Sources(index.sizes, along(x, dim, index.at(axes), axes), cast(value, x.dtype))


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default)
def scatter(
    ctx: Builder, x: Value, dim: int, index: Value, src: Any = None, value: Any = None, reduce: str | None = None
) -> Value:
    copy = copy_of(ctx, x)
    scatter_to(ctx, copy, dim, index, value if src is None else src, reduce)
    return copy


@lowers(
    aten.scatter_.src, aten.scatter_.value, aten.scatter_.reduce, aten.scatter_.value_reduce, aten.scatter_add_.default
)
def scatter_(
    ctx: Builder, x: Value, dim: int, index: Value, src: Any = None, value: Any = None, reduce: str | None = None
) -> Value:
    scatter_to(ctx, x, dim, kept_apart(ctx, index, x), value if src is None else src, reduce)
    return x


def scatter_to(ctx: Builder, target: Value, dim: int, index: Value, src: Any, reduce: str | None) -> None:
    adds = ctx.operator in (aten.scatter_add.default, aten.scatter_add_.default)
    mode = "add" if adds else "set" if reduce is None else MODES[reduce]
    scatter_sources(ctx, target, dim, index, src).store(ctx, target, mode)


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool
) -> Value:
    return combined(ctx, x, scatter_sources(ctx, x, dim, index, src), reduce, include_self)


def combined(ctx: Builder, x: Value, sources: Sources, reduce: str, include_self: bool) -> Value:
    """A copy of `x`, sources combined into it; without `include_self`, what `x` has at these places does not count."""
    result, mode = copy_of(ctx, x), MODES[reduce]
    if not include_self:
        first = None if mode in ("amax", "amin") else const(1 if mode == "mul" else 0, x.dtype)
        sources.store(ctx, result, "set", first)
    sources.store(ctx, result, mode)
    return mean_of(ctx, result, sources, include_self) if reduce == "mean" else result


def mean_of(ctx: Builder, totals: Value, sources: Sources, include_self: bool) -> Value:
    dtype = totals.dtype
    count = ctx.fill(totals.sizes, 1 if include_self else 0, I64, totals.device)
    sources.store(ctx, count, "add", const(1, I64))
    axes, wide = own_axes(totals.sizes), arithmetic_type(dtype)
    many = cast(op("maximum", count.at(axes), const(1, I64)), wide)
    name = "floor_divide" if is_integer(dtype) else "div"
    return ctx.lazy(totals.sizes, cast(op(name, cast(totals.at(axes), wide), many), dtype), totals.device)


# --- along one dimension ----------------------------------------------------------------------------------------------


def slice_sources(
    x: Value, dim: int, index: Value, sizes: Sequence[Index], source: Any, wraps: bool = False, complaint: str = ALONG
) -> Sources:
    """Slices of a source, each stored where the index at its number says."""
    read = wrapped if wraps else straight
    if not x.rank or (isinstance(source, Value) and source.rank != x.rank):
        raise NotLowered("slices of a number, or of another rank: eager says which it takes")
    at, axes = dim_of(dim, x.rank), own_axes(sizes)
    said = complaint % at if "%d" in complaint else complaint
    place = put(axes, at, read(index.at([axes[at]][: index.rank]), x.sizes[at], said))
    value = source.at(axes[: source.rank]) if isinstance(source, Value) else source
    return Sources(sizes, place, value)


def with_length(x: Value, dim: int, index: Value) -> list[Index]:
    """The sizes of the slices that indices name."""
    if index.rank > 1:
        raise NotLowered("indices that are no row: eager refuses them")
    return put(x.sizes, dim_of(dim, x.rank), index.sizes[0] if index.rank else ONE) if x.rank else []


@lowers(aten.index_add.default)
def index_add(ctx: Builder, x: Value, dim: int, index: Value, source: Value, alpha: Any) -> Value:
    said = SELF if x.rank <= 1 else ALONG
    sources = slice_sources(x, dim, index, with_length(x, dim, index), source, complaint=said)
    wide, value = arithmetic_type(x.dtype), cast(sources.source, x.dtype)
    if alpha != 1:
        value = cast(op("mul", cast(value, wide), cast(ctx.elements(alpha, ()), wide)), x.dtype)
    copy = copy_of(ctx, x)
    sources.store(ctx, copy, "add", value)
    return copy


@lowers(aten.index_copy.default)
def index_copy(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    copy = copy_of(ctx, x)
    said = OUTSIDE.replace("index", "index_copy_(): index", 1)
    slice_sources(x, dim, index, with_length(x, dim, index), source, complaint=said).store(ctx, copy, "set")
    return copy


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Builder, x: Value, dim: int, index: Value, value: Any) -> Value:
    copy = copy_of(ctx, x)
    element = cast(ctx.elements(value, ()), x.dtype)
    slice_sources(x, dim, index, with_length(x, dim, index), element, True, OUTSIDE).store(ctx, copy, "set")
    return copy


@lowers(aten.index_reduce.default)
def index_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, include_self: bool
) -> Value:
    return combined(ctx, x, slice_sources(x, dim, index, with_length(x, dim, index), source), reduce, include_self)


@lowers(aten.put.default)
def put_(ctx: Builder, x: Value, index: Value, source: Value, accumulate: bool) -> Value:
    copy = copy_of(ctx, x)
    flat, axes = flattened(copy), own_axes(index.sizes)
    values = reshaped(source, index.sizes)
    place = [wrapped(index.at(axes), flat.sizes[0], FLAT)]
    scatter_into(ctx, flat, index.sizes, place, cast(values.at(axes), x.dtype), "add" if accumulate else "set")
    return copy


# --- masks ------------------------------------------------------------------------------------------------------------

TOO_FEW = "RuntimeError: Number of elements of source < number of ones in mask"


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Builder, x: Value, mask: Value, value: Any) -> Value:
    sizes, dtype = ctx.out_sizes, ctx.out_dtype
    if mask.dtype is not B8:
        raise NotLowered("a mask that is none: eager refuses it")
    chosen, old = cast(ctx.elements(mask, sizes), B8), cast(ctx.elements(x, sizes), dtype)
    return ctx.lazy(sizes, op("where", chosen, cast(ctx.elements(value, sizes), dtype), old, dtype=dtype), x.device)


@lowers(aten.masked_scatter.default)
def masked_scatter(ctx: Builder, x: Value, mask: Value, source: Value) -> Value:
    """The elements of the source, in order, where the mask holds."""
    sizes = ctx.out_sizes
    if mask.dtype is not B8:
        raise NotLowered("a mask that is none: eager refuses it")
    axes, supply = own_axes(sizes), flattened(source)
    number = reshaped(numbered(ctx, mask, sizes), sizes).at(axes)
    taken = supply.at([data(number, supply.sizes[0], TOO_FEW)])
    return ctx.lazy(sizes, masked(cast(ctx.elements(mask, sizes), B8), taken, ctx.elements(x, sizes)), x.device)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(ctx: Builder, grad_output: Value, mask: Value, sizes: Sequence[Index | int]) -> Value:
    """What the mask holds of, in order, then zeros; what it does not hold of is written behind the end."""
    wanted = ctx.out_sizes
    count, shape = total(wanted), grad_output.sizes
    axes = own_axes(shape)
    number = reshaped(numbered(ctx, mask, shape), shape).at(axes)
    result = ctx.fill((count + 1,), 0, grad_output.dtype, grad_output.device)
    chosen = cast(ctx.elements(mask, shape), B8)
    place = data(op("where", chosen, number, index_value(count), dtype=I64), count + 1)
    scatter_into(ctx, result, shape, [place], ctx.elements(grad_output, shape), "set")
    return reshaped(sliced(result, 0, ZERO, ONE, count), wanted)


@lowers(aten.nonzero_static.default)
def nonzero_static(ctx: Builder, x: Value, size: Any, fill_value: int) -> Value:
    """Where elements are not zero, in order, as many as asked for; what is left over holds the fill."""
    sizes, count = ctx.out_sizes, ctx.index(size)
    if not x.rank or count is ZERO or ZERO in x.sizes:
        return ctx.fill(sizes, fill_value, I64, x.device)
    axes = own_axes(x.sizes)
    chosen = ctx.lazy(x.sizes, cast(x.at(axes), B8), x.device)
    place = reshaped(numbered(ctx, chosen, x.sizes), x.sizes).at(axes)
    wanted = op("logical_and", chosen.at(axes), op("lt", place, index_value(count), dtype=B8))
    row = data(op("where", wanted, place, index_value(count), dtype=I64), count + 1)  # the last row takes the rest
    found = ctx.fill((count + 1, sizes[1]), fill_value, I64, x.device)
    for dim, item in enumerate(axes):
        scatter_into(ctx, found, x.sizes, [row, number(dim)], index_value(item), "set")
    return ctx.lazy(sizes, found.at(own_axes(sizes)), x.device)


def numbered(ctx: Builder, mask: Value, sizes: Sequence[Index]) -> Value:
    """For every element, in order: how many before it the mask holds of, and -1 more where it does not."""
    count = total(sizes)
    spread = mask.view(
        sizes,
        [
            ZERO if size is ONE else item
            for size, item in zip(mask.sizes, own_axes(sizes)[len(sizes) - mask.rank :], strict=True)
        ],
    )
    flat = reshaped(spread, (count,))
    one = cast(cast(flat.at(own_axes((count,))), B8), I64)
    (seen,) = add_scan(ctx, Combine("sum"), (count,), 0, [one], [I64], mask.device)
    assert seen is not None
    return ctx.lazy((count,), op("sub", seen.at(own_axes((count,))), const(1, I64)), mask.device)
