"""Loops that are operations of their own: reductions, scans and sorts, whose results are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrite.ir import Axis, Expr, Index, axis
from ferrite.ir.program import Combine, Destination, Reduce, Scan, Sort
from ferrite.lower.builder import Builder
from ferrite.lower.memory import wanted_strides
from ferrite.lower.value import Box, Value, own_axes, whole


def add_reduce(
    ctx: Builder,
    kind: str,
    sizes: Sequence[Index],
    over: Sequence[Index],
    values: Sequence[Callable[[Sequence[Index], Sequence[Index]], Expr]] | Sequence[Expr],
    dtypes: Sequence[torch.dtype | None],
    device: torch.device,
) -> tuple[Value | None, ...]:
    """Combine over axes r0, r1, ...: one value per result, of these sizes; a dtype of None: not wanted.

    Values are expressions over i0.. (of `sizes`) and r0.. (of `over`), or functions of both that give them.
    """
    outer, inner = own_axes(sizes), own_axes(over, "r")
    made = [value(outer, inner) if callable(value) else value for value in values]
    destinations, results = new_destinations(ctx, sizes, dtypes, device)
    axes = tuple(item for item in outer if isinstance(item, Axis))
    reduced = tuple(item for item in inner if isinstance(item, Axis))
    ctx.add(Reduce(axes, reduced, kind, tuple(made), destinations, ctx.origin))
    return results


def add_scan(
    ctx: Builder,
    combine: Combine,
    sizes: Sequence[Index],
    along: int,
    values: Sequence[Expr],
    dtypes: Sequence[torch.dtype | None],
    device: torch.device,
) -> tuple[Value | None, ...]:
    """Inclusive prefixes along a dimension; values are expressions over the axes of `sizes`."""
    axes, line = full_axes(ctx, sizes, along)
    destinations, results = new_destinations(ctx, sizes, dtypes, device, line)
    ctx.add(Scan(axes, line, combine, tuple(values), destinations, ctx.origin))
    return results


def add_sort(
    ctx: Builder,
    sizes: Sequence[Index],
    along: int,
    keys: Sequence[Expr],
    dtypes: Sequence[torch.dtype | None],
    descending: bool,
    stable: bool,
    device: torch.device,
) -> tuple[Value | None, ...]:
    """Keys sorted along a dimension, and last the places they came from."""
    axes, line = full_axes(ctx, sizes, along)
    destinations, results = new_destinations(ctx, sizes, dtypes, device, line)
    ctx.add(Sort(axes, line, tuple(keys), destinations, descending, stable, ctx.origin))
    return results


def full_axes(ctx: Builder, sizes: Sequence[Index], along: int) -> tuple[tuple[Axis, ...], Axis]:
    """The axes of sizes, with one along a dimension even if its size is one."""
    outer = list(own_axes(sizes))
    if not isinstance(outer[along], Axis):
        outer[along] = axis(f"i{along}", sizes[along])
    line = outer[along]
    assert isinstance(line, Axis)
    return tuple(item for item in outer if isinstance(item, Axis)), line


def new_destinations(
    ctx: Builder,
    sizes: Sequence[Index],
    dtypes: Sequence[torch.dtype | None],
    device: torch.device,
    line: Axis | None = None,
) -> tuple[tuple[Destination | None, ...], tuple[Value | None, ...]]:
    """Memory for results, and the values that see it."""
    destinations: list[Destination | None] = []
    results: list[Value | None] = []
    for place, dtype in enumerate(dtypes):
        if dtype is None:
            destinations.append(None)
            results.append(None)
            continue
        box = Box(tuple(sizes), dtype, device, origins=(ctx.origin,))
        box.buffer = ctx.new_buffer(box, wanted_strides(ctx, place, sizes))
        axes = [line if line is not None and line.name == f"i{k}" else item for k, item in enumerate(own_axes(sizes))]
        destinations.append(Destination(box.buffer, tuple(axes)))
        results.append(whole(box))
    return tuple(destinations), tuple(results)
