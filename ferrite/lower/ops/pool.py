"""Pooling: a small reduction over a window of every result, and backwards a sum over the windows an element lies in.

window of result o:  o * stride - padding + r * dilation,  r below the kernel's size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.ir import (
    ZERO,
    Expr,
    Index,
    arithmetic_type,
    cast,
    const,
    index_value,
    is_integer,
    maximum,
    minimum,
    number,
    op,
)
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import wanted_strides
from ferrite.lower.ops.accumulate import gathered, scattered
from ferrite.lower.ops.conditions import B8, all_inside, every, guarded
from ferrite.lower.ops.index import I64, straight
from ferrite.lower.ops.views import reshaped, total
from ferrite.lower.stores import scatter_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes
from ferrite.machines import machine_of

aten = torch.ops.aten
NOT_IN_PLANE = "RuntimeError: Found an invalid max index: {index} (output planes are of size {size})"


def lowest(dtype: torch.dtype) -> Expr:
    return const(torch.iinfo(dtype).min if is_integer(dtype) else -math.inf, dtype)


def dims_of(operator: Any) -> int:
    """How many dimensions a window has, as the operator's name says."""
    return next(n for n in (1, 2, 3) if f"{n}d" in str(operator))


class PoolWindows:
    """The windows over the last `n` dimensions of a tensor."""

    def __init__(self, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> None:
        self.n = n
        self.kernel = spread(kernel, n)
        self.stride = spread(stride, n) if stride else self.kernel
        self.padding, self.dilation = spread(padding, n), spread(dilation, n)

    @property
    def over(self) -> list[Index]:
        return [number(size) for size in self.kernel]

    def start(self, axes: Sequence[Index]) -> list[Index]:
        return [item * step - pad for item, step, pad in zip(axes, self.stride, self.padding, strict=True)]

    def at(self, axes: Sequence[Index], inner: Sequence[Index]) -> list[Index]:
        return [start + item * step for start, item, step in zip(self.start(axes), inner, self.dilation, strict=True)]

    @property
    def holding(self) -> list[Index]:
        """How many windows an element may lie in, along each dimension."""
        return [number(d * (k - 1) // s + 1) for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)]

    def holder(self, axes: Sequence[Index], inner: Sequence[Index]) -> list[Index]:
        """One of the windows that may hold an element, counted from the last."""
        return [
            (item + pad) // step - back
            for item, pad, step, back in zip(axes, self.padding, self.stride, inner, strict=True)
        ]


def spread(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


# --- the greatest of a window -----------------------------------------------------------------------------------------


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    ctx: Builder, x: Value, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[Value, Value]:
    n = dims_of(ctx.operator)
    windows = PoolWindows(n, kernel_size, stride, padding, dilation)
    lead, spatial = x.rank - n, x.sizes[x.rank - n :]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        place = windows.at(outer[lead:], inner)
        return guarded(all_inside(place, spatial), x.at([*outer[:lead], *place]), lowest(x.dtype))

    best, offset = greatest(ctx, windows.over, element, x)
    axes = own_axes(ctx.out_sizes)
    parts = unravelled(offset.at(axes), windows.kernel)
    places = []
    for start, part, step in zip(windows.start(axes[lead:]), parts, windows.dilation, strict=True):
        # a window of nothing but the lowest value: the first element in it counts, not the padding before
        first = maximum(ZERO, -(start // step))
        within = part if first is ZERO else op("maximum", part, index_value(first))
        places.append(op("add", index_value(start), op("mul", within, const(step, I64))))
    return best, ctx.lazy(ctx.out_sizes, ravelled(places, spatial), x.device)


def greatest(ctx: Builder, over: Sequence[Index], element: Any, x: Value) -> tuple[Value, Value]:
    """The greatest element of every window, and its number in the window, as narrow as it fits.

    Eager lets every NaN replace what it has found so far: the last one of a window counts.
    """
    count = total(over).high
    narrow = torch.int8 if count is not None and count <= 128 else I64
    wide = arithmetic_type(x.dtype)

    def ordered(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        return cast(element(outer, inner), wide)

    best, offset = add_reduce(ctx, "argmax_of_window", ctx.out_sizes, over, [ordered], [wide, narrow], x.device)
    assert best is not None
    assert offset is not None
    if wide != x.dtype:
        best = ctx.lazy(ctx.out_sizes, cast(best.at(own_axes(ctx.out_sizes)), x.dtype), x.device)
    return best, offset


def unravelled(offset: Expr, sizes: Sequence[int | Index]) -> list[Expr]:
    """A number within a window as one number per dimension."""
    rest, parts = cast(offset, I64), list[Expr]()
    for size in reversed(sizes[1:]):
        extent = index_value(number(size) if isinstance(size, int) else size)
        parts.append(op("remainder", rest, extent))
        rest = op("floor_divide", rest, extent)
    return [rest, *reversed(parts)]


def ravelled(places: Sequence[Expr], sizes: Sequence[Index]) -> Expr:
    """One number per dimension as a number within the plane."""
    flat = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        flat = op("add", op("mul", flat, index_value(size)), place)
    return flat


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(
    ctx: Builder,
    grad_output: Value,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    indices: Value,
    ceil_mode: bool,
) -> Value:
    n = dims_of(ctx.operator)
    windows = PoolWindows(n, kernel_size, stride, padding, dilation)
    most = total(windows.holding).high
    if most is None or most > machine_of(x.device).max_asked_windows:
        return to_their_places(ctx, grad_output, indices, n)
    lead, spatial, dtype = x.rank - n, x.sizes[x.rank - n :], ctx.out_dtype

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        holder = windows.holder(outer[lead:], inner)
        place = [*outer[:lead], *holder]
        mine = ravelled([index_value(item) for item in outer[lead:]], spatial)
        chosen = op("eq", indices.at(place), mine, dtype=B8)
        part = op("where", chosen, grad_output.at(place), const(0, dtype), dtype=dtype)
        exists = all_inside(holder, grad_output.sizes[lead:])
        return cast(guarded(exists, part, const(0, dtype)), arithmetic_type(dtype))

    return gathered(ctx, x.sizes, windows.holding, element, x.device)


def to_their_places(ctx: Builder, grad: Value, indices: Value, n: int) -> Value:
    """Every gradient adds itself to the element it came from, which an index within the plane names."""
    lead, sizes = grad.rank - n, ctx.out_sizes
    axes, plane = own_axes(grad.sizes), total(sizes[len(sizes) - n :])
    place = [*axes[:lead], straight(indices.at(axes), plane)]
    return scattered(ctx, grad.sizes, place, grad.at(axes), seen_as=[*sizes[:lead], plane])


@lowers(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(
    ctx: Builder, x: Value, indices: Value, output_size: Any, stride: Any = None, padding: Any = None
) -> Value:
    """Zeros, and every element at the place in the plane that an index names."""
    n, sizes = dims_of(ctx.operator), ctx.out_sizes
    lead, plane, axes = x.rank - n, total(sizes[len(sizes) - n :]), own_axes(x.sizes)
    result = ctx.fill(sizes, 0, x.dtype, x.device)
    result.box.strides = wanted_strides(ctx, 0, sizes)
    if plane.high == 0:  # padding took all of it: torch asks for no index there
        return result
    place = [*axes[:lead], straight(indices.at(axes), plane, NOT_IN_PLANE)]
    scatter_into(ctx, reshaped(result, [*sizes[:lead], plane]), x.sizes, place, x.at(axes), "set")
    return result


@lowers(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def sparse_backward(ctx: Builder, grad_output: Value, x: Value, indices: Value, **how: Any) -> Value:
    return to_their_places(ctx, grad_output, indices, dims_of(ctx.operator))


# --- the mean of a window ---------------------------------------------------------------------------------------------


class Divisor:
    """What the sum of a window is divided by."""

    def __init__(
        self, windows: PoolWindows, spatial: Sequence[Index], with_padding: bool, override: int | None
    ) -> None:
        self.windows, self.spatial, self.with_padding, self.override = windows, spatial, with_padding, override

    def of(self, axes: Sequence[Index]) -> Index:
        if self.override is not None:
            return number(self.override)
        windows, lengths = self.windows, list[Index]()
        for start, kernel, pad, size in zip(
            windows.start(axes), windows.kernel, windows.padding, self.spatial, strict=True
        ):
            end = minimum(start + kernel, size + pad)
            lengths.append(end - start if self.with_padding else minimum(end, size) - maximum(start, ZERO))
        return total(lengths)


def divided(value: Expr, by: Index) -> Expr:
    """Integers round towards zero."""
    return op("trunc_divide" if is_integer(value.dtype) else "div", value, cast(index_value(by), value.dtype))


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    ctx: Builder,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Value:
    n = dims_of(ctx.operator)
    windows = PoolWindows(n, kernel_size, stride, padding)
    lead, spatial, wide = x.rank - n, x.sizes[x.rank - n :], arithmetic_type(x.dtype)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        place = windows.at(outer[lead:], inner)
        return cast(guarded(all_inside(place, spatial), x.at([*outer[:lead], *place]), const(0, x.dtype)), wide)

    # a window may be far larger than what it slides over: what lies beyond adds nothing
    over = [minimum(k, size + pad) for k, size, pad in zip(windows.over, spatial, windows.padding, strict=True)]
    (sums,) = add_reduce(ctx, "sum", ctx.out_sizes, over, [element], [wide], x.device)
    assert sums is not None
    axes = own_axes(ctx.out_sizes)
    by = Divisor(windows, spatial, count_include_pad, divisor_override).of(axes[lead:])
    return ctx.lazy(ctx.out_sizes, cast(divided(sums.at(axes), by), x.dtype), x.device)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: Builder,
    grad_output: Value,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    n = dims_of(ctx.operator)
    windows = PoolWindows(n, kernel_size, stride, padding)
    lead, dtype = x.rank - n, ctx.out_dtype
    divisor = Divisor(windows, x.sizes[lead:], count_include_pad, divisor_override)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        holder = windows.holder(outer[lead:], inner)
        within = [item - start for item, start in zip(outer[lead:], windows.start(holder), strict=True)]
        exists = every(all_inside(holder, grad_output.sizes[lead:]), all_inside(within, windows.over))
        part = divided(cast(grad_output.at([*outer[:lead], *holder]), arithmetic_type(dtype)), divisor.of(holder))
        return guarded(exists, part, const(0, part.dtype))

    return gathered(ctx, x.sizes, windows.holding, element, x.device)
