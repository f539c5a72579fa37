"""What a sorted row answers: medians, the greatest few, the k-th.

Which of equal elements is named: for `topk` and `median` torch documents that any may be. Here it is the first of them,
and only of wide floats, where equals are rare. For `kthvalue` on a CPU it documents no such thing: there the place is
eager's, which follows from how its kernel partitions, and only the value is computed here.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, Expr, Index, cast, const, data, index_value, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.ops.reduce import Rows
from ferrite.lower.ops.scan import OWN_ORDER, alone, sorted_along
from ferrite.lower.ops.views import dim_of, flattened, put
from ferrite.lower.stores import scatter_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes
from ferrite.machines import gpu_machine

aten = torch.ops.aten
I64, B8 = torch.int64, torch.bool
WIDE_FLOATS = (torch.float32, torch.float64)


def ordered(
    ctx: Builder, x: Value, dim: int, descending: bool = False, places_count: bool = True
) -> tuple[Value, Value, int]:
    """Sorted values, their places, and the dimension, counted from the front."""
    if places_count and x.dtype not in WIDE_FLOATS:
        raise NotLowered(OWN_ORDER)
    if x.dtype is torch.bool:
        raise NotLowered("truth values, which are eager's business")
    if not x.rank:
        values, places = alone(ctx, x, x.dtype, I64)
        return values, places, 0
    length = x.sizes[dim_of(dim, x.rank)].high
    if x.device.type == "cuda" and (length is None or length > gpu_machine().max_sorted_elements):
        raise NotLowered("torch need not sort a long row to find some of it")
    values, places = sorted_along(ctx, x, dim, descending, True)
    return values, places, dim_of(dim, x.rank)


def at_place(
    ctx: Builder, x: Value, dim: int, keepdim: bool, place: Any, places_count: bool = True
) -> tuple[Value, ...]:
    """The value, and its place, at one place of every sorted row; `place`: an index, or what finds it."""
    if x.rank and x.sizes[dim_of(dim, x.rank)].low == 0:
        raise NotLowered("a row that may be empty")
    values, places, at = ordered(ctx, x, dim, places_count=places_count)
    if not x.rank:
        return values, places
    sizes = put(x.sizes, at, ONE) if keepdim else [*x.sizes[:at], *x.sizes[at + 1 :]]
    axes = list(own_axes(sizes))
    outer = [*axes[:at], *axes[at + 1 :]] if keepdim else axes
    index = place if isinstance(place, Index) else place(ctx, x, at, keepdim)
    found = [*outer[:at], index, *outer[at:]]
    return tuple(ctx.lazy(sizes, each.at(found), x.device) for each in (values, places))


def nan_count(ctx: Builder, x: Value, at: int, keepdim: bool) -> Expr:
    if not x.dtype.is_floating_point:
        return const(0, I64)
    rows = Rows(ctx, x, [at], keepdim)
    total = rows.one("sum", cast(op("isnan", rows.element(), dtype=B8), I64), I64)
    return rows.of(total)


def middle(ctx: Builder, x: Value, at: int, keepdim: bool) -> Index:
    """The lower of the middle two; the first NaN where there is one, which sorts behind all numbers."""
    size, nans = x.sizes[at], nan_count(ctx, x, at, keepdim)
    numbers = op("sub", index_value(size), nans)
    none = op("eq", nans, const(0, I64), dtype=B8)
    return data(op("where", none, index_value((size - 1) // 2), numbers, dtype=I64), size)


def middle_of_numbers(ctx: Builder, x: Value, at: int, keepdim: bool) -> Index:
    """The lower of the middle two numbers; of a row of NaN the first."""
    size, nans = x.sizes[at], nan_count(ctx, x, at, keepdim)
    last = op("maximum", op("sub", op("sub", index_value(size), nans), const(1, I64)), const(0, I64))
    return data(op("floor_divide", last, const(2, I64)), size)


@lowers(aten.median.dim)
def median_dim(ctx: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, ...]:
    return at_place(ctx, x, dim, keepdim, middle, places_count=ctx.is_used(1))


@lowers(aten.nanmedian.dim)
def nanmedian_dim(ctx: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, ...]:
    return at_place(ctx, x, dim, keepdim, middle_of_numbers, places_count=ctx.is_used(1))


@lowers(aten.median.default)
def median(ctx: Builder, x: Value) -> Value:
    return at_place(ctx, flattened(x), 0, False, middle, places_count=False)[0]


@lowers(aten.nanmedian.default)
def nanmedian(ctx: Builder, x: Value) -> Value:
    return at_place(ctx, flattened(x), 0, False, middle_of_numbers, places_count=False)[0]


@lowers(aten.kthvalue.default)
def kthvalue(ctx: Builder, x: Value, k: Any, dim: int, keepdim: bool) -> tuple[Value, ...]:
    place_counts = ctx.is_used(1) and bool(x.rank)
    if place_counts and x.device.type == "cpu":
        raise NotLowered(OWN_ORDER)
    return at_place(ctx, x, dim, keepdim, ctx.index(k) - 1, places_count=place_counts)


@lowers(aten.topk.default)
def topk(ctx: Builder, x: Value, k: Any, dim: int, largest: bool, sorted: bool) -> tuple[Value, ...]:
    values, places, _ = ordered(ctx, x, dim, largest, places_count=ctx.is_used(1))
    sizes = ctx.out_sizes
    return tuple(ctx.lazy(sizes, each.at(own_axes(sizes)), x.device) for each in (values, places))


@lowers(aten.histc.default)
def histc(ctx: Builder, x: Value, bins: int, min: Any, max: Any) -> Value:
    """How many elements fall into each of equal bins; the range is that of the elements where none is given."""
    if x.dtype not in WIDE_FLOATS or isinstance(min, Index | Expr) or isinstance(max, Index | Expr):
        raise NotLowered("other than plain floats")
    if min == max:
        raise NotLowered("a range that the data decides")
    flat, dtype = flattened(x), x.dtype
    element = flat.at(own_axes(flat.sizes))
    low, high = const(float(min), dtype), const(float(max), dtype)
    inside = op("logical_and", op("ge", element, low, dtype=B8), op("le", element, high, dtype=B8))
    scaled = op("mul", op("sub", element, low), const(float(bins), dtype))
    place = cast(op("trunc", op("div", scaled, op("sub", high, low))), I64)
    place = op("minimum", op("where", inside, place, const(0, I64), dtype=I64), const(bins - 1, I64))
    counts = ctx.lazy((number(bins),), const(0.0, dtype), x.device)
    scatter_into(ctx, counts, flat.sizes, [data(place, number(bins))], cast(inside, dtype), "add")
    return counts
