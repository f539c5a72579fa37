"""Pads that repeat what is inside, and windows laid out as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.ir import ZERO, Expr, Index, arithmetic_type, cast, const, maximum, minimum, number
from ferrite.lower.builder import Builder
from ferrite.lower.ops.accumulate import gathered, scattered
from ferrite.lower.ops.concat import pads_before
from ferrite.lower.ops.conditions import all_inside, divides, every, guarded
from ferrite.lower.ops.pool import PoolWindows, spread
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten


def reflected(index: Index, size: Index) -> Index:
    """Mirrored at the first and at the last element."""
    forward = maximum(index, -index)
    beyond = forward - (size - 1)
    return size - 1 - maximum(beyond, -beyond)


def replicated(index: Index, size: Index) -> Index:
    return maximum(minimum(index, size - 1), ZERO)


def padded_place(ctx: Builder, outer: Sequence[Index], inner: Sequence[Index], padding: Sequence[Any]) -> list[Index]:
    """For each place of the padded tensor, the one inside."""
    rule = reflected if "reflection" in str(ctx.operator) else replicated
    befores = pads_before(ctx, len(outer), padding)
    padded = range(len(outer) - len(padding) // 2, len(outer))
    return [
        rule(item - before, size) if dim in padded else item
        for dim, (item, before, size) in enumerate(zip(own_axes(outer), befores, inner, strict=True))
    ]


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def pad(ctx: Builder, x: Value, padding: Sequence[Any]) -> Value:
    sizes = ctx.out_sizes
    return ctx.lazy(sizes, x.at(padded_place(ctx, sizes, x.sizes, padding)), x.device)


@lowers(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default)
@lowers(aten.reflection_pad3d_backward.default, aten.replication_pad1d_backward.default)
@lowers(aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default)
def pad_backward(ctx: Builder, grad_output: Value, x: Value, padding: Sequence[Any]) -> Value:
    place = padded_place(ctx, grad_output.sizes, x.sizes, padding)
    return scattered(ctx, grad_output.sizes, place, grad_output.at(own_axes(grad_output.sizes)))


# --- windows as columns -----------------------------------------------------------------------------------------------


def columns(windows: PoolWindows, spatial: Sequence[Index]) -> list[Index]:
    """How many windows fit along each dimension."""
    parts = zip(spatial, windows.kernel, windows.stride, windows.padding, windows.dilation, strict=True)
    return [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in parts
    ]


@lowers(aten.im2col.default)
def im2col(ctx: Builder, x: Value, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    windows = PoolWindows(2, kernel_size, stride, padding, dilation)
    sizes, spatial = ctx.out_sizes, x.sizes[-2:]
    *batch, row, column = own_axes(sizes)
    width, (high, wide) = columns(windows, spatial)[1], windows.kernel
    within = [row // wide % high, row % wide]
    place = windows.at([column // width, column % width], within)
    value = x.at([*batch, row // (high * wide), *place])
    return ctx.lazy(sizes, guarded(all_inside(place, spatial), value, const(0, x.dtype)), x.device)


@lowers(aten.col2im.default)
def col2im(
    ctx: Builder, x: Value, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Value:
    """Every element sums up what the windows it lies in say of it."""
    windows = PoolWindows(2, kernel_size, stride, padding, dilation)
    sizes = ctx.out_sizes
    counts, (high, wide) = columns(windows, sizes[-2:]), windows.kernel
    steps = [number(step) for step in spread(stride, 2)]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        *lead, channel = outer[:-2]
        away = [
            item + pad - r * step
            for item, pad, r, step in zip(outer[-2:], windows.padding, inner, windows.dilation, strict=True)
        ]
        holder = [each // step for each, step in zip(away, steps, strict=True)]
        exists = every(
            *(divides(step, each) for each, step in zip(away, steps, strict=True)), all_inside(holder, counts)
        )
        row = (channel * high + inner[0]) * wide + inner[1]
        value = x.at([*lead, row, holder[0] * counts[1] + holder[1]])
        return cast(guarded(exists, value, const(0, x.dtype)), arithmetic_type(x.dtype))

    return gathered(ctx, sizes, windows.over, element, x.device)
