"""Where values lie: the buffer that is a value, copies of it, and eager's strides for what is new."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrite.ir import ONE, ZERO, Data, Expr, Index, contiguous_strides
from ferrite.lower.builder import Builder
from ferrite.lower.strides import Strided, by_coordinates, by_torch, same_strides
from ferrite.lower.value import Value, broadcast_place, own_axes


def buffer_of(ctx: Builder, value: Value, fake: torch.Tensor | None = None) -> str:
    """A buffer that is this value, for a call or an output: a strided view where it can be, else a copy.

    With `fake`, the strides are eager's: a view that has others is copied, dimensions of size one take theirs.
    """
    name = ctx.realise(value.box)
    buffer = ctx.buffers[name]
    if buffer.kind == "foreign":
        return name
    wanted = ctx.sizes.indices(fake.stride()) if fake is not None else None
    if (
        value.is_whole
        and buffer.dtype == value.dtype
        and (wanted is None or buffer.strides == wanted or ZERO in value.sizes)
    ):
        return name

    def fits(found: Strided) -> bool:
        return wanted is None or same_strides(value.sizes, found[0], wanted)

    found = strides_in_storage(ctx, value) or by_torch(ctx, buffer, value, fake)
    if ZERO in value.sizes or not (found is None or fits(found)):
        # where nothing of a dimension of one begins, no coordinate tells, nor that 8*(s//24) is s//3
        found = by_torch(ctx, buffer, value, fake) or found
    if found is not None and fits(found):
        strides = wanted if wanted is not None else filled(value.sizes, found[0])
        return ctx.new_view(buffer, value.dtype, value.sizes, strides, found[1])
    return buffer_of_copy(ctx, value, wanted)


def strides_in_storage(ctx: Builder, value: Value) -> Strided | None:
    """Strides and offset of a value in its buffer's storage; None where its elements do not lie so."""
    return by_coordinates(ctx.buffers[ctx.realise(value.box)], value)


def filled(sizes: Sequence[Index], strides: Sequence[Index]) -> tuple[Index, ...]:
    """Strides with those of dimensions of size one as a dense tensor would have them."""
    dense = contiguous_strides(sizes)
    return tuple(dense[k] if size is ONE else strides[k] for k, size in enumerate(sizes))


def copied(ctx: Builder, value: Value, strides: Sequence[Index] | None = None) -> Value:
    """The same elements in memory of their own. Eager may have one element at many places, by a stride of 0: so have
    we, and it is written once."""
    steps = tuple(strides) if strides is not None else None
    if steps is not None and all(size.low is not None and size.low > 0 for size in value.sizes):
        once = tuple(ONE if step is ZERO else size for size, step in zip(value.sizes, steps, strict=True))
        if once != value.sizes:
            element = copied(ctx, value.view(once, own_axes(once)), steps)
            return element.view(value.sizes, broadcast_place(once, value.sizes))
    new = ctx.lazy(value.sizes, ctx.elements(value, value.sizes), value.device)
    new.box.strides = steps
    ctx.realise(new.box)
    return new


def buffer_of_copy(ctx: Builder, value: Value, strides: Sequence[Index] | None) -> str:
    copy = copied(ctx, value, strides)
    name = ctx.realise(copy.box)
    if copy.is_whole or strides is None:
        return name
    return ctx.new_view(ctx.buffers[name], value.dtype, value.sizes, strides, ctx.buffers[name].offset)


def in_memory(ctx: Builder, value: Value) -> Value:
    """The value, with its box realised."""
    ctx.realise(value.box)
    return value


def element_at(ctx: Builder, value: Value, coordinates: Sequence[Index]) -> Expr:
    """The element at a place that memory decides. The check of that place stays, whatever the elements are: where
    they do not depend on it (all ones), they are read from memory all the same."""
    expr = value.at(coordinates)
    checks = {atom for index in coordinates for atom in index.atoms if isinstance(atom, Data)}
    if checks <= expr.atoms:
        return expr
    ctx.realise(value.box)
    return value.at(coordinates)


def wanted_strides(ctx: Builder, result: int, sizes: Sequence[Index]) -> tuple[Index, ...] | None:
    """Eager's strides of one result, if it has these sizes."""
    fake = ctx.out[result] if isinstance(ctx.out, (tuple, list)) and result < len(ctx.out) else ctx.out
    if ZERO in sizes:  # torch's fake value of a reduction to nothing has other strides than eager
        return None
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided and ctx.shape(fake) == tuple(sizes):
        return dense_strides(ctx, fake)
    return None


def dense_strides(ctx: Builder, fake: torch.Tensor) -> tuple[Index, ...] | None:
    """Strides that memory of its own can have: no element twice."""
    strides = ctx.sizes.indices(fake.stride())
    sizes = ctx.shape(fake)
    repeated = any(stride is ZERO and size is not ONE for stride, size in zip(strides, sizes, strict=True))
    return None if repeated and ZERO not in sizes else strides
