"""Resampling: every result is a weighted sum of a few elements, one list of taps per dimension.

Places and weights are computed in floats as eager does, so that the same elements are chosen.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, Expr, Index, arithmetic_type, axis, cast, const, data, index_value, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import in_memory
from ferrite.lower.ops.accumulate import gathered, scattered
from ferrite.lower.ops.conditions import B8
from ferrite.lower.ops.index import I64
from ferrite.lower.ops.pool import dims_of
from ferrite.lower.sizes import constant_value
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
F32 = torch.float32
MAX_TABLE_ENTRIES = 1 << 16  # beyond, places are computed when it runs, not checked beforehand
CUBIC = -0.75


def scales_of(given: dict[str, Any]) -> list[float | None]:
    """The factors of the dimensions, in order, however the operator calls them."""
    return [given[name] for name in ("scales", "scales_d", "scales_h", "scales_w") if name in given]


def ratio(size: Index, count: Index, factor: float | None, dtype: torch.dtype) -> Expr:
    """Elements per result."""
    if factor is not None and factor > 0:
        return const(1.0 / factor, dtype)
    many, few = constant_value(size), constant_value(count)
    if many is not None and few:
        return const(many / few, dtype)
    return op("div", cast(index_value(size), dtype), cast(index_value(count), dtype))


# --- nearest ----------------------------------------------------------------------------------------------------------


def nearest(output_index: Index, size: Index, count: Index, factor: float | None, exact: bool) -> Index:
    """The element under a result; a quotient of whole numbers where that is the same for every result."""
    many, few = constant_value(size), constant_value(count)
    if many is not None and few is not None and 0 < few <= MAX_TABLE_ENTRIES:
        if few == many and factor is None:
            return output_index
        turns = (lambda at: (2 * at + 1) * many // (2 * few)) if exact else (lambda at: at * many // few)
        if all(turns(at) == rounded_place(at, many, few, factor, exact) for at in range(few)):
            return (output_index * 2 + 1) * size // (count * 2) if exact else output_index * size // count
    at = cast(index_value(output_index), F32)
    if exact:
        at = op("add", at, const(0.5, F32))
    found = cast(op("floor", op("mul", at, ratio(size, count, factor, F32))), I64)
    return data(op("minimum", found, index_value(size - 1)), size)


def rounded_place(at: int, size: int, count: int, factor: float | None, exact: bool) -> int:
    """What eager computes, in 32-bit floats."""
    scale = single(1.0 / factor if factor is not None and factor > 0 else size / count)
    return min(math.floor(single((at + 0.5 if exact else at) * scale)), size - 1)


def single(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def nearest_places(ctx: Builder, outer: Sequence[Index], inner: Sequence[Index], factors: Any) -> list[Index]:
    exact = "exact" in str(ctx.operator)
    axes = own_axes(outer)
    lead = len(outer) - len(factors)
    spots = zip(axes[lead:], inner[lead:], outer[lead:], factors, strict=True)
    return [*axes[:lead], *(nearest(item, size, count, factor, exact) for item, size, count, factor in spots)]


@lowers(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default)
@lowers(aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default)
@lowers(aten._upsample_nearest_exact3d.default)
def upsample_nearest(ctx: Builder, x: Value, output_size: Any, **scales: Any) -> Value:
    sizes = ctx.out_sizes
    return ctx.lazy(sizes, x.at(nearest_places(ctx, sizes, x.sizes, scales_of(scales))), x.device)


@lowers(aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default)
@lowers(aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default)
@lowers(aten._upsample_nearest_exact2d_backward.default, aten._upsample_nearest_exact3d_backward.default)
def upsample_nearest_backward(
    ctx: Builder, grad_output: Value, output_size: Any, input_size: Any, **scales: Any
) -> Value:
    sizes, factors = ctx.out_sizes, scales_of(scales)
    places = nearest_places(ctx, grad_output.sizes, sizes, factors)
    repeats = whole_repeats(grad_output.sizes, sizes, places)
    if repeats is None:
        return scattered(ctx, grad_output.sizes, places, grad_output.at(own_axes(grad_output.sizes)))
    wide, over = arithmetic_type(ctx.out_dtype), [many for many in repeats if many is not ONE]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        left = iter(inner)
        place = [item if many is ONE else item * many + next(left) for item, many in zip(outer, repeats, strict=True)]
        return cast(grad_output.at(place), wide)

    return gathered(ctx, sizes, over, element, grad_output.device)


def whole_repeats(outer: Sequence[Index], inner: Sequence[Index], places: Sequence[Index]) -> list[Index] | None:
    """How often each element is repeated along each dimension, where that is the same for all."""
    repeats = []
    for count, size, place, item in zip(outer, inner, places, own_axes(outer), strict=True):
        many = count // size if count % size is number(0) else None
        if many is None or place is not item // many:
            return None
        repeats.append(many)
    return repeats


# --- linear and cubic -------------------------------------------------------------------------------------------------


class Taps:
    """The elements a result is made of along one dimension, and their weights."""

    def __init__(self, places: Sequence[Expr], weights: Sequence[Expr], size: Index) -> None:
        self.places, self.weights, self.size = places, weights, size

    def at(self, tap: int) -> Index:
        return data(self.places[tap], self.size)

    def chosen(self, tap: Index) -> tuple[Index, Expr]:
        """Place and weight of a tap that is a loop variable."""
        return data(choice(tap, self.places), self.size), choice(tap, self.weights)


def choice(which: Index, options: Sequence[Expr]) -> Expr:
    *others, last = options
    for place in reversed(range(len(others))):
        here = op("eq", index_value(which), const(place, I64), dtype=B8)
        last = op("where", here, others[place], last, dtype=last.dtype)
    return last


def source_place(
    item: Index, size: Index, count: Index, corners: bool, factor: float | None, dtype: torch.dtype
) -> Expr:
    """Where a result lies among the elements, as a float."""
    at = cast(index_value(item), dtype)
    if corners:
        gaps = ratio(size - 1, count - 1, None, dtype) if constant_value(count) != 1 else const(0, dtype)
        if constant_value(count) is None:
            alone = op("le", index_value(count), const(1, I64), dtype=B8)
            gaps = op("where", alone, const(0, dtype), gaps, dtype=dtype)
        return op("mul", gaps, at)
    middle = op("mul", ratio(size, count, factor, dtype), op("add", at, const(0.5, dtype)))
    return op("sub", middle, const(0.5, dtype))


def linear_taps(
    item: Index, size: Index, count: Index, corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    at = source_place(item, size, count, corners, factor, dtype)
    at = at if corners else op("maximum", at, const(0, dtype))
    last = index_value(size - 1)
    low = op("minimum", cast(at, I64), last)
    high = op("minimum", op("add", low, const(1, I64)), last)
    part = clamp(op("sub", at, cast(low, dtype)), dtype)
    return Taps([low, high], [op("sub", const(1, dtype), part), part], size)


def clamp(value: Expr, dtype: torch.dtype) -> Expr:
    """Between zero and one."""
    return op("minimum", op("maximum", value, const(0, dtype)), const(1, dtype))


def cubic_taps(
    output_index: Index, size: Index, count: Index, corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    at = source_place(output_index, size, count, corners, factor, dtype)
    floor = op("floor", at)
    first, last = cast(floor, I64), index_value(size - 1)
    places = [
        op("maximum", op("minimum", op("add", first, const(step, I64)), last), const(0, I64)) for step in (-1, 0, 1, 2)
    ]
    return Taps(places, cubic_weights(clamp(op("sub", at, floor), dtype)), size)


def cubic_weights(part: Expr) -> list[Expr]:
    dtype = part.dtype
    rest = op("sub", const(1, dtype), part)
    one = const(1, dtype)
    return [far(op("add", part, one)), near(part), near(rest), far(op("add", rest, one))]


def polynomial(at: Expr, *coefficients: float) -> Expr:
    """Highest power first."""
    numbers: list[Expr] = [const(value, at.dtype) for value in coefficients]
    return functools.reduce(lambda total, value: op("add", op("mul", total, at), value), numbers[1:], numbers[0])


def near(at: Expr) -> Expr:
    return polynomial(at, CUBIC + 2, -(CUBIC + 3), 0.0, 1.0)


def far(at: Expr) -> Expr:
    return polynomial(at, CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC)


KINDS = {"linear": linear_taps, "cubic": cubic_taps}


def taps_of(
    ctx: Builder, outer: Sequence[Index], inner: Sequence[Index], corners: bool, factors: Any, dtype: torch.dtype
) -> list[Taps]:
    make = KINDS["cubic" if "cubic" in str(ctx.operator) else "linear"]
    n = dims_of(ctx.operator)
    lead = len(outer) - n
    spots = zip(own_axes(outer)[lead:], inner[lead:], outer[lead:], factors, strict=True)
    return [make(item, size, count, corners, factor, dtype) for item, size, count, factor in spots]


def weighted(
    x: Value, lead: Sequence[Index], taps: Sequence[Taps], dtype: torch.dtype, place: Sequence[Index] = ()
) -> Expr:
    """The sum over all taps, the last dimension innermost."""
    if not taps:
        return cast(x.at([*lead, *place]), dtype)
    first, rest = taps[0], taps[1:]
    terms = [
        op("mul", weight, weighted(x, lead, rest, dtype, [*place, first.at(tap)]))
        for tap, weight in enumerate(first.weights)
    ]
    return functools.reduce(lambda left, right: op("add", left, right), terms)


@lowers(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default)
@lowers(aten.upsample_bicubic2d.default)
def upsample_weighted(ctx: Builder, x: Value, output_size: Any, align_corners: bool, **scales: Any) -> Value:
    if not x.dtype.is_floating_point:
        raise NotLowered("weights of integers are rounded in torch's own way")
    sizes, dtype = ctx.out_sizes, arithmetic_type(x.dtype)
    taps = taps_of(ctx, sizes, x.sizes, align_corners, scales_of(scales), dtype)
    lead = own_axes(sizes)[: x.rank - len(taps)]
    return ctx.lazy(sizes, cast(weighted(x, lead, taps, dtype), x.dtype), x.device)


@lowers(aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default)
@lowers(aten.upsample_trilinear3d_backward.default, aten.upsample_bicubic2d_backward.default)
def upsample_weighted_backward(
    ctx: Builder, grad_output: Value, output_size: Any, input_size: Any, align_corners: bool, **scales: Any
) -> Value:
    """Every gradient adds its weighted parts to the elements it was made of; the taps are loops of their own."""
    sizes, dtype = ctx.out_sizes, arithmetic_type(ctx.out_dtype)
    taps = taps_of(ctx, grad_output.sizes, sizes, align_corners, scales_of(scales), dtype)
    axes, rank = own_axes(grad_output.sizes), grad_output.rank
    points = [*grad_output.sizes, *(number(len(each.weights)) for each in taps)]
    chosen = [each.chosen(axis(f"i{rank + k}", len(each.weights))) for k, each in enumerate(taps)]
    source = cast(grad_output.at(axes), dtype)
    for _, weight in chosen:
        source = op("mul", source, weight)
    return scattered(ctx, points, [*axes[: rank - len(taps)], *(place for place, _ in chosen)], source)


# --- with windows as wide as the scale --------------------------------------------------------------------------------


@lowers(aten._upsample_bilinear2d_aa.default)
def upsample_antialiased(ctx: Builder, x: Value, output_size: Any, align_corners: bool, **scales: Any) -> Value:
    """One dimension after the other, the last first, as in eager."""
    if not x.dtype.is_floating_point:
        raise NotLowered("weights of integers are rounded in torch's own way")
    windows = [
        Window(size, count, align_corners, factor, arithmetic_type(x.dtype))
        for size, count, factor in zip(x.sizes[2:], ctx.out_sizes[2:], scales_of(scales), strict=True)
    ]
    result = windows[0].resampled(ctx, windows[1].resampled(ctx, x, 3), 2)
    return ctx.convert(result, x.dtype)


class Window:
    """The elements that a result is made of along one dimension: those closer than a scale to where it lies, the less
    of each the farther it is."""

    def __init__(self, size: Index, count: Index, corners: bool, factor: float | None, dtype: torch.dtype) -> None:
        many, few = constant_value(size), constant_value(count)
        if many is None or not few:
            raise NotLowered("how wide its windows are is known when it runs")
        if corners:
            scale = (many - 1) / (few - 1) if few > 1 else 0.0
        else:
            scale = 1.0 / factor if factor is not None and factor > 0 else many / few
        self.size, self.count, self.dtype = size, count, dtype
        self.scale, self.support = scale, max(scale, 1.0)
        self.taps = number(2 * math.ceil(self.support) + 1)

    def number(self, value: float) -> Expr:
        return const(value, self.dtype)

    def begin(self, item: Index) -> tuple[Expr, Expr, Expr]:
        """Where a result lies among the elements, the first that it is made of, and the one behind the last."""
        half, support = self.number(0.5), self.number(self.support)
        center = op("mul", self.number(self.scale), op("add", cast(index_value(item), self.dtype), half))
        first = op("maximum", cast(op("add", op("sub", center, support), half), I64), const(0, I64))
        end = op("minimum", cast(op("add", op("add", center, support), half), I64), index_value(self.size))
        return center, first, end

    def weight(self, item: Index, tap: Index, total: Expr | None = None) -> Expr:
        """What an element counts, as a part of `total`, if that is known; then what is none of the window has -1."""
        center, first, end = self.begin(item)
        place = op("add", first, index_value(tap))
        away = op("add", op("sub", cast(place, self.dtype), center), self.number(0.5))
        share = op("abs", op("mul", away, self.number(1.0 / self.support)))
        weight = op("maximum", op("sub", self.number(1), share), self.number(0))
        beyond = self.number(0 if total is None else -1)
        weight = weight if total is None else op("div", weight, total)
        return op("where", op("lt", place, end, dtype=B8), weight, beyond, dtype=self.dtype)

    def resampled(self, ctx: Builder, x: Value, dim: int) -> Value:
        """Places and weights are tables: they are the same for all rows, and take longer than a sum of them."""
        counts, (item, tap) = (self.count, self.taps), own_axes((self.count, self.taps))

        def weight(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
            return self.weight(outer[0], inner[0])

        (total,) = add_reduce(ctx, "sum", counts[:1], counts[1:], [weight], [self.dtype], x.device)
        assert total is not None
        weights = in_memory(ctx, ctx.lazy(counts, self.weight(item, tap, total.at((item,))), x.device))
        last = index_value(self.size - 1)
        place = op("minimum", op("add", self.begin(item)[1], index_value(tap)), last)
        places = in_memory(ctx, ctx.lazy(counts, place, x.device))

        def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
            at = (outer[dim], inner[0])
            source = x.at([*outer[:dim], data(places.at(at), self.size), *outer[dim + 1 :]])
            part = op("mul", cast(source, self.dtype), weights.at(at))
            is_inside = op("ge", weights.at(at), self.number(0), dtype=B8)  # times zero, infinity would be NaN
            return op("where", is_inside, part, self.number(0), dtype=self.dtype)

        sizes = [*x.sizes[:dim], self.count, *x.sizes[dim + 1 :]]
        (result,) = add_reduce(ctx, "sum", sizes, (self.taps,), [element], [self.dtype], x.device)
        assert result is not None
        return result


eager(
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa_backward.default,
    because="its windows are as wide as the scale, with weights that torch works out for each",
)
