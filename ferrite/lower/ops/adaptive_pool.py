"""Pooling with windows that follow from the sizes, or from random numbers.

adaptive:  the window of result o is from o * I // O to the ceiling of (o + 1) * I / O
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ZERO, Expr, Index, arithmetic_type, cast, const, data, index_value, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.ops.accumulate import gathered
from ferrite.lower.ops.conditions import at_least, below, every, guarded
from ferrite.lower.ops.index import I64
from ferrite.lower.ops.pool import dims_of, divided, greatest, lowest, ravelled, spread, unravelled
from ferrite.lower.ops.views import total
from ferrite.lower.sizes import constant_value
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten


# --- adaptive windows -------------------------------------------------------------------------------------------------


class Adaptive:
    """Windows that share out `size` elements among `count` results, along one dimension."""

    def __init__(self, size: Index, count: Index) -> None:
        self.size, self.count = size, count

    def start(self, place: Index) -> Index:
        return place * self.size // self.count

    def end(self, place: Index) -> Index:
        return -(-((place + 1) * self.size) // self.count)

    @property
    def longest(self) -> Index:
        size, count = constant_value(self.size), constant_value(self.count)
        if size is None or count is None:
            even = self.size % self.count
            return self.size // self.count if even is ZERO else self.size // self.count + 2
        return number(max((-(-(at + 1) * size // count) - at * size // count for at in range(count)), default=0))

    def reversed(self) -> Adaptive:
        """Which results an element belongs to: the same windows, the other way round."""
        return Adaptive(self.count, self.size)


def adaptive(x: Value, sizes: Sequence[Index], n: int) -> list[Adaptive]:
    """The windows of the last dimensions. Eager refuses some images without elements that torch's tracing lets pass,
    and among no results nothing can be shared out: both are left to it."""
    if ZERO in (*x.sizes, *sizes):
        raise NotLowered("windows without elements")
    return [Adaptive(size, count) for size, count in zip(x.sizes[x.rank - n :], sizes[len(sizes) - n :], strict=True)]


def adaptive_element(x: Value, windows: Sequence[Adaptive], other: Expr) -> Any:
    lead = x.rank - len(windows)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        place = [window.start(item) + r for window, item, r in zip(windows, outer[lead:], inner, strict=True)]
        within = [below(at, window.end(item)) for window, item, at in zip(windows, outer[lead:], place, strict=True)]
        return guarded(every(*within), x.at([*outer[:lead], *place]), other)

    return element


@lowers(aten.adaptive_avg_pool1d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: Builder, x: Value, output_size: Any) -> Value:
    windows = adaptive(x, ctx.out_sizes, dims_of(ctx.operator))
    wide, lead = arithmetic_type(x.dtype), x.rank - len(windows)
    inner = adaptive_element(x, windows, const(0, x.dtype))
    over = [window.longest for window in windows]
    (sums,) = add_reduce(ctx, "sum", ctx.out_sizes, over, [lambda i, r: cast(inner(i, r), wide)], [wide], x.device)
    assert sums is not None
    axes = own_axes(ctx.out_sizes)
    by = total([window.end(item) - window.start(item) for window, item in zip(windows, axes[lead:], strict=True)])
    return ctx.lazy(ctx.out_sizes, cast(divided(sums.at(axes), by), x.dtype), x.device)


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: Builder, grad_output: Value, x: Value) -> Value:
    n, wide = dims_of(ctx.operator), arithmetic_type(ctx.out_dtype)
    lead = x.rank - n
    windows = adaptive(x, grad_output.sizes, n)
    holders = [window.reversed() for window in windows]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        place = [holder.start(item) + r for holder, item, r in zip(holders, outer[lead:], inner, strict=True)]
        exists = [below(at, holder.end(item)) for holder, item, at in zip(holders, outer[lead:], place, strict=True)]
        by = total([window.end(at) - window.start(at) for window, at in zip(windows, place, strict=True)])
        part = divided(cast(grad_output.at([*outer[:lead], *place]), wide), by)
        return guarded(every(*exists), part, const(0, wide))

    return gathered(ctx, x.sizes, [holder.longest for holder in holders], element, x.device)


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(ctx: Builder, x: Value, output_size: Any) -> tuple[Value, Value]:
    windows = adaptive(x, ctx.out_sizes, dims_of(ctx.operator))
    over, lead = [window.longest for window in windows], x.rank - len(windows)
    best, offset = greatest(ctx, over, adaptive_element(x, windows, lowest(x.dtype)), x)
    axes = own_axes(ctx.out_sizes)
    parts = unravelled(offset.at(axes), over)
    starts = [index_value(window.start(item)) for window, item in zip(windows, axes[lead:], strict=True)]
    places = [op("add", start, part) for start, part in zip(starts, parts, strict=True)]
    return best, ctx.lazy(ctx.out_sizes, ravelled(places, x.sizes[lead:]), x.device)


# --- fractional windows -----------------------------------------------------------------------------------------------


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(
    ctx: Builder, x: Value, kernel_size: Any, output_size: Any, random_samples: Value
) -> tuple[Value, Value]:
    if arithmetic_type(x.dtype) != x.dtype:
        raise NotLowered("windows that are computed in 16-bit floats")
    n = dims_of(ctx.operator)
    kernel, lead, sizes = spread(kernel_size, n), x.rank - n, ctx.out_sizes
    spatial = x.sizes[lead:]

    def starts(outer: Sequence[Index]) -> list[Index]:
        planes = [*([ZERO] if lead == 1 else []), *outer[:lead]]
        order = range(n) if n == 3 else reversed(range(n))  # in two dimensions, the first sample is for the columns
        samples = [random_samples.at([*planes, number(each)]) for each in order]
        return [
            fractional_start(sample, item, size, count, size - k)
            for sample, item, size, count, k in zip(samples, outer[lead:], spatial, sizes[lead:], kernel, strict=True)
        ]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        return x.at([*outer[:lead], *(start + r for start, r in zip(starts(outer), inner, strict=True))])

    best, offset = greatest(ctx, [number(k) for k in kernel], element, x)
    axes = own_axes(sizes)
    parts = unravelled(offset.at(axes), kernel)
    places = [op("add", index_value(start), part) for start, part in zip(starts(axes), parts, strict=True)]
    return best, ctx.lazy(sizes, ravelled(places, spatial), x.device)


def fractional_start(sample: Expr, place: Index, size: Index, count: Index, last: Index) -> Index:
    """Where a window starts: even steps from a random offset, rounded down; the last one ends with the tensor."""
    dtype = sample.dtype
    steps = cast(index_value(count - 1), dtype)
    step = op("div", cast(index_value(last), dtype), steps)
    moved = cast(op("mul", op("add", cast(index_value(place), dtype), sample), step), I64)
    start = op("sub", moved, cast(op("mul", sample, step), I64))
    is_last = at_least(place, count - 1)
    return data(op("where", is_last, index_value(last), start, dtype=I64), last + 1)
