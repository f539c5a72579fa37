"""Sums in two ways: every result gathers what belongs to it, or every source adds itself to where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrite.ir import ONE, Expr, Index, arithmetic_type, cast, const
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import wanted_strides
from ferrite.lower.ops.views import reshaped
from ferrite.lower.stores import scatter_into
from ferrite.lower.value import Value, own_axes

Element = Callable[[Sequence[Index], Sequence[Index]], Expr]


def gathered(
    ctx: Builder, sizes: Sequence[Index], over: Sequence[Index], element: Element, device: torch.device
) -> Value:
    """The sum of an element over a window, in the type of the result; of a window of one, just the element."""
    if all(size is ONE for size in over):
        value = element(own_axes(sizes), own_axes(over, "r"))
        return ctx.lazy(sizes, cast(value, ctx.out_dtype), device)
    (total,) = add_reduce(ctx, "sum", sizes, over, [element], [ctx.out_dtype], device)
    assert total is not None
    return total


def scattered(
    ctx: Builder, points: Sequence[Index], place: Sequence[Index], source: Expr, seen_as: Sequence[Index] | None = None
) -> Value:
    """Zeros of the result's sizes, and at every point `source` added at a place; 16-bit floats add up widened.

    The place is one in the result, or in the result reshaped to `seen_as`.
    """
    sizes, dtype, wide = ctx.out_sizes, ctx.out_dtype, arithmetic_type(ctx.out_dtype)
    total = ctx.lazy(sizes, const(0, wide), ctx.out.device)
    total.box.strides = wanted_strides(ctx, 0, sizes)
    target = total if seen_as is None else reshaped(total, seen_as)
    scatter_into(ctx, target, points, place, cast(source, wide), "add")
    return ctx.convert(total, dtype)
