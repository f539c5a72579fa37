"""Writing to memory that a program has already: pending values that read it read it first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrite.ir import Axis, Expr, Index, Load, cast, nodes_of
from ferrite.ir.program import Compute, Store
from ferrite.lower.builder import Builder
from ferrite.lower.materialise import from_several
from ferrite.lower.value import Value, own_axes


def write_into(ctx: Builder, target: Value, source: Value | bool | int | float) -> Value:
    """target.copy_(source): the elements of `source`, broadcast and converted, into the target's memory."""
    expr = cast(ctx.elements(source, target.sizes), target.dtype)
    if target.box.expr is not None and target.is_whole:  # private and pending: later readers get the new elements
        target.box.expr = expr
        if expr.loads:
            ctx.pending[target.box] = None
        return target
    name = ctx.realise(target.box)
    if isinstance(expr, Load) and (expr.buffer, expr.coordinates) == (name, target.coordinates):
        return target  # onto itself
    storage = ctx.buffers[name].storage
    if reads_elsewhere(ctx, expr, name, target.coordinates):
        expr = in_own_memory(ctx, expr, target.sizes, target.device)
    ctx.before_write(storage)
    axes = tuple(item for item in own_axes(target.sizes) if isinstance(item, Axis))
    ctx.add(Compute(axes, (Store(name, target.coordinates, expr),), ctx.origin))
    return target


def scatter_into(
    ctx: Builder, target: Value, sizes: Sequence[Index], place: Sequence[Index], source: Expr, mode: str
) -> None:
    """At every point of `sizes`, store `source` at a place of the target, or combine it with what is there."""
    if mode != "set" and from_several(source, own_axes(sizes)):
        source = in_own_memory(ctx, source, sizes, target.device)
    name = ctx.realise(target.box)
    if reads_elsewhere(ctx, source, name, ()):
        source = in_own_memory(ctx, source, sizes, target.device)
    ctx.before_write(ctx.buffers[name].storage)
    axes = tuple(item for item in own_axes(sizes) if isinstance(item, Axis))
    ctx.add(Compute(axes, (Store(name, target.through(place), source, mode),), ctx.origin))  # type: ignore[arg-type]


def reads_elsewhere(ctx: Builder, expr: Expr, name: str, coordinates: Sequence[Index]) -> bool:
    """Whether an expression reads elements of a buffer's storage other than the one about to be written."""
    storage = ctx.buffers[name].storage
    for item in nodes_of(expr):
        if not isinstance(item, Load) or ctx.buffers[item.buffer].storage != storage:
            continue
        if item.buffer != name or item.coordinates != tuple(coordinates):
            return True
    return False


def in_own_memory(ctx: Builder, source: Expr, sizes: Sequence[Index], device: torch.device) -> Expr:
    """The same elements, read from memory of their own."""
    value = ctx.lazy(sizes, source, device)
    ctx.realise(value.box)
    return ctx.elements(value, sizes)
