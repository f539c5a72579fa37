"""Tensors put together, repeated, shifted and padded.

Concatenating allocates once, and every part is computed straight into its place. The others move nothing: they are
index maps over what they read, computed where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, Axis, Index, cast, is_integer
from ferrite.ir.program import Compute, Store
from ferrite.lower.builder import Builder
from ferrite.lower.memory import wanted_strides
from ferrite.lower.ops.conditions import all_inside, guarded
from ferrite.lower.ops.views import dim_of, flattened, put, reshaped
from ferrite.lower.table import lowers
from ferrite.lower.value import Box, Value, is_one, own_axes, whole

aten, prims = torch.ops.aten, torch.ops.prims


@lowers(aten.cat.default, prims.cat.default)
def cat(ctx: Builder, tensors: Sequence[Value], dim: int) -> Value:
    parts = [part for part in tensors if part.sizes != (ZERO,)]  # torch lets these stand beside anything
    if not parts:
        return nothing(ctx)
    at = dim_of(dim, len(ctx.out_sizes))
    concat = allocated(ctx)
    start: Index = ZERO
    for part in parts:
        axes = own_axes(part.sizes)
        fill(ctx, concat, part, put(axes, at, axes[at] + start))
        start = start + part.sizes[at]
    return concat


@lowers(aten.stack.default)
def stack(ctx: Builder, tensors: Sequence[Value], dim: int) -> Value:
    at = dim_of(dim, len(ctx.out_sizes))
    concat = allocated(ctx)
    for place, part in enumerate(tensors):
        axes = own_axes(part.sizes)
        fill(ctx, concat, part, [*axes[:at], ctx.index(place), *axes[at:]])
    return concat


def nothing(ctx: Builder) -> Value:
    """A result without elements."""
    return ctx.fill(ctx.out_sizes, 0, ctx.out_dtype, ctx.out.device)


def allocated(ctx: Builder) -> Value:
    """Memory of the result's sizes, with eager's strides and nothing in it yet."""
    sizes = ctx.out_sizes
    box = Box(sizes, ctx.out_dtype, ctx.out.device, origins=(ctx.origin,))
    box.buffer = ctx.new_buffer(box, wanted_strides(ctx, 0, sizes))
    return whole(box)


def fill(ctx: Builder, target: Value, part: Value, coordinates: Sequence[Index]) -> None:
    """Compute a part into its place."""
    assert target.box.buffer is not None
    axes = tuple(item for item in own_axes(part.sizes) if isinstance(item, Axis))
    value = cast(part.at(own_axes(part.sizes)), target.dtype)
    ctx.add(Compute(axes, (Store(target.box.buffer, tuple(coordinates), value),), ctx.origin))


@lowers(aten.repeat.default)
def repeat(ctx: Builder, x: Value, repeats: Sequence[Index | int]) -> Value:
    sizes = ctx.out_sizes
    axes = own_axes(sizes)[len(sizes) - x.rank :]
    return moved(
        ctx, x, [ZERO if size in (ONE, ZERO) else item % size for item, size in zip(axes, x.sizes, strict=True)]
    )


@lowers(aten.roll.default)
def roll(ctx: Builder, x: Value, shifts: Sequence[Index | int], dims: Sequence[int]) -> Value:
    if not dims:
        flat = flattened(x)
        return moved(ctx, reshaped(shifted(flat, 0, ctx.index(shifts[0])), x.sizes), own_axes(x.sizes))
    result = x
    for shift, dim in zip(shifts, dims, strict=True):
        result = shifted(result, dim_of(dim, x.rank), ctx.index(shift)) if x.rank else result
    return moved(ctx, result, own_axes(x.sizes))


def shifted(x: Value, at: int, by: Index) -> Value:
    axes, size = own_axes(x.sizes), x.sizes[at]
    return x if is_one(size) or size is ZERO else x.view(x.sizes, put(axes, at, (axes[at] - by) % size))


@lowers(aten.flip.default)
def flip(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    return moved(ctx, x, reversed_place(x, dims))


@lowers(prims.rev.default)
def rev(ctx: Builder, a: Value, dims: Sequence[int]) -> Value:
    return moved(ctx, a, reversed_place(a, dims))


def reversed_place(x: Value, dims: Sequence[int]) -> list[Index]:
    back = {dim_of(dim, x.rank) for dim in dims}
    return [
        size - 1 - item if k in back else item
        for k, (item, size) in enumerate(zip(own_axes(x.sizes), x.sizes, strict=True))
    ]


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: Builder, x: Value, upscale_factor: int) -> Value:
    """Channels become pixels."""
    *lead, channel, row, column = own_axes(ctx.out_sizes)
    many = upscale_factor
    return moved(ctx, x, [*lead, (channel * many + row % many) * many + column % many, row // many, column // many])


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: Builder, x: Value, downscale_factor: int) -> Value:
    """Pixels become channels."""
    if any(size.low is None or size.low < 1 for size in x.sizes):
        raise NotLowered("eager leaves a picture without pixels as it is")
    *lead, channel, row, column = own_axes(ctx.out_sizes)
    many = downscale_factor
    within = row * many + channel // many % many, column * many + channel % many
    return moved(ctx, x, [*lead, channel // (many * many), *within])


def moved(ctx: Builder, x: Value, coordinates: Sequence[Index]) -> Value:
    """A tensor of its own, of the result's sizes, whose element is the one at a place of `x`."""
    return ctx.lazy(ctx.out_sizes, x.at(coordinates), x.device)


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: Builder, x: Value, pad: Sequence[Index | int], value: Any) -> Value:
    sizes = ctx.out_sizes
    place = [item - before for item, before in zip(own_axes(sizes), pads_before(ctx, x.rank, pad), strict=True)]
    number = int(value) if is_integer(x.dtype) and isinstance(value, (bool, float)) else value
    other = cast(ctx.elements(number, ()), x.dtype)
    return ctx.lazy(sizes, guarded(all_inside(place, x.sizes), x.at(place), other), x.device)


def pads_before(ctx: Builder, rank: int, pad: Sequence[Index | int]) -> list[Index]:
    """How much comes before each dimension: pads are given in pairs, for the last dimension first."""
    befores: list[Index] = [ZERO] * rank
    for pair in range(len(pad) // 2):
        befores[rank - 1 - pair] = ctx.index(pad[2 * pair])
    return befores
