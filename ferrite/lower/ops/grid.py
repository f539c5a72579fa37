"""Sampling at places that a grid of coordinates names: -1 is one side of the tensor, 1 the other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ferrite.errors import NotLowered
from ferrite.ir import Expr, Index, arithmetic_type, cast, const, data, index_value, masked, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.index import I64
from ferrite.lower.ops.pool import dims_of
from ferrite.lower.ops.resample import cubic_weights
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
LINEAR, NEAREST, CUBIC = 0, 1, 2  # torch's numbers
ZEROS, BORDER, REFLECTION = 0, 1, 2


class SampledSide:
    """One dimension of the sampled tensor: from coordinates to places in it."""

    def __init__(self, size: Index, padding: int, corners: bool, dtype: torch.dtype) -> None:
        self.size, self.padding, self.corners, self.dtype = size, padding, corners, dtype

    def number(self, index: Index) -> Expr:
        return cast(index_value(index), self.dtype)

    def unscaled(self, coordinate: Expr) -> Expr:
        """From -1..1 to places; without corners, the ends are half an element outside."""
        one, two = const(1, self.dtype), const(2, self.dtype)
        moved = op("add", coordinate, one)
        if self.corners:
            return op("mul", op("div", moved, two), self.number(self.size - 1))
        return op("div", op("sub", op("mul", moved, self.number(self.size)), one), two)

    def padded(self, place: Expr) -> Expr:
        if self.padding == ZEROS:
            return place
        if self.padding == REFLECTION:
            place = self.reflected(place)
        # a coordinate that is no number is the first place, as in eager
        return op("minimum", op("fmax", place, const(0, self.dtype)), self.number(self.size - 1))

    def reflected(self, place: Expr) -> Expr:
        zero = const(0, self.dtype)
        low = zero if self.corners else const(-0.5, self.dtype)
        there_and_back = self.number((self.size - 1 if self.corners else self.size) * 2)
        away = op("abs", op("sub", place, low))
        turns = op("trunc", op("div", away, there_and_back))
        extra = op("sub", away, op("mul", turns, there_and_back))
        mirrored = op("add", op("minimum", extra, op("sub", there_and_back, extra)), low)
        alone = op("eq", there_and_back, zero, dtype=B8)
        return op("where", alone, zero, mirrored, dtype=self.dtype)

    def tap(self, place: Expr) -> tuple[Expr, Index]:
        """A place as an index, and whether it is inside."""
        found = cast(place, I64)
        above = op("ge", found, const(0, I64), dtype=B8)
        within = op("logical_and", above, op("lt", found, index_value(self.size), dtype=B8))
        return within, data(found, self.size)


Taps = Sequence[tuple[Expr, Index, Expr | None]]  # whether it is inside, where, and its weight


def linear_taps(side: SampledSide, coordinate: Expr) -> Taps:
    place = side.padded(side.unscaled(coordinate))
    low = op("floor", place)
    high = op("add", low, const(1, side.dtype))
    part = op("sub", place, low)
    weights = (op("sub", const(1, side.dtype), part), part)
    return [(*side.tap(each), weight) for each, weight in zip((low, high), weights, strict=True)]


def nearest_tap(side: SampledSide, coordinate: Expr) -> Taps:
    return [(*side.tap(op("round", side.padded(side.unscaled(coordinate)))), None)]


def cubic_taps(side: SampledSide, coordinate: Expr) -> Taps:
    """Here every tap is padded, not the place between them."""
    place = side.unscaled(coordinate)
    floor = op("floor", place)
    weights = cubic_weights(op("sub", place, floor))
    places = [side.padded(op("add", floor, const(step, side.dtype))) for step in (-1, 0, 1, 2)]
    return [(*side.tap(each), weight) for each, weight in zip(places, weights, strict=True)]


MODES = {LINEAR: linear_taps, NEAREST: nearest_tap, CUBIC: cubic_taps}


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: Builder, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    if not x.dtype.is_floating_point:
        raise NotLowered("eager samples floating-point numbers alone, if there are any")
    n, sizes, dtype = dims_of(ctx.operator), ctx.out_sizes, arithmetic_type(x.dtype)
    batch, channel, *axes = own_axes(sizes)
    taps = []
    for dim, size in enumerate(x.sizes[2:]):
        coordinate = cast(
            grid.at([batch, *axes, number(n - 1 - dim)]), dtype
        )  # the grid names the last dimension first
        taps.append(MODES[interpolation_mode](SampledSide(size, padding_mode, align_corners, dtype), coordinate))
    parts = [part(x, (batch, channel), corner, dtype) for corner in itertools.product(*taps)]
    return ctx.lazy(sizes, cast(functools.reduce(lambda a, b: op("add", a, b), parts), x.dtype), x.device)


def part(x: Value, lead: Sequence[Index], corner: Taps, dtype: torch.dtype) -> Expr:
    """One element times its weights; what is outside counts as zero."""
    within = functools.reduce(lambda a, b: op("logical_and", a, b), [inside for inside, _, _ in corner])
    value = masked(within, cast(x.at([*lead, *(place for _, place, _ in corner)]), dtype), const(0, dtype))
    weights = [weight for _, _, weight in corner if weight is not None]
    return op("mul", value, functools.reduce(lambda a, b: op("mul", a, b), weights)) if weights else value


eager(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    because="it adds to the gradients of the tensor and of the grid in one walk over both",
)
