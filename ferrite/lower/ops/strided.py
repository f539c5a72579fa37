"""Views of memory by strides, reinterpreted bits, and tensors with a part of them replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import begins_its_storage
from ferrite.errors import NotLowered
from ferrite.graph import eager_refuses
from ferrite.ir import ONE, ZERO, Expr, Index, arithmetic_type, cast, const, number, op, symbol
from ferrite.ir.program import Bind, writes
from ferrite.lower.builder import Builder
from ferrite.lower.memory import copied, strides_in_storage
from ferrite.lower.ops.accumulate import gathered
from ferrite.lower.ops.conditions import at_least, below, clamped, divides, every, from_the_end, guarded, same
from ferrite.lower.ops.views import dim_of, selected_place, start_of
from ferrite.lower.sizes import constant_value
from ferrite.lower.stores import write_into
from ferrite.lower.strides import same_strides
from ferrite.lower.table import lowers
from ferrite.lower.value import Box, Value, own_axes, whole

aten, prims = torch.ops.aten, torch.ops.prims
Number = Index | int


# --- views ------------------------------------------------------------------------------------------------------------


@lowers(aten.as_strided.default, aten.as_strided_.default)
def as_strided(
    ctx: Builder, x: Value, size: Sequence[Number], stride: Sequence[Number], storage_offset: Number | None
) -> Value:
    return strided_view(ctx, x, size, stride, storage_offset)


@lowers(aten.as_strided_copy.default)
def as_strided_copy(
    ctx: Builder, x: Value, size: Sequence[Number], stride: Sequence[Number], storage_offset: Number | None
) -> Value:
    return ctx.lazy(
        ctx.out_sizes, strided_view(ctx, x, size, stride, storage_offset).at(own_axes(ctx.out_sizes)), x.device
    )


@lowers(prims.as_strided.default)
def prims_as_strided(
    ctx: Builder, a: Value, size: Sequence[Number], stride: Sequence[Number], storage_offset: Number
) -> Value:
    return strided_view(ctx, a, size, stride, storage_offset)


def strided_view(
    ctx: Builder, x: Value, size: Sequence[Number], stride: Sequence[Number], offset: Number | None
) -> Value:
    """Elements of the storage that `x` lies in, wherever in it; the offset counts from the storage's beginning."""
    if is_beyond(ctx, x, size, stride, offset):
        raise NotLowered("a view of more than the storage has: eager refuses it")
    sizes, strides = [ctx.index(item) for item in size], [ctx.index(item) for item in stride]
    own = as_eager(ctx, x)
    if own is None:
        copy = dense_copy(ctx, x)
        return view_of_storage(
            ctx, copy, x.dtype, sizes, strides, ZERO if offset is None else ctx.index(offset) - own_offset(ctx, x)
        )
    start = own if offset is None else ctx.index(offset) - beginning(ctx, x)
    return view_of_storage(ctx, x, x.dtype, sizes, strides, start)


def is_beyond(ctx: Builder, x: Value, size: Sequence[Number], stride: Sequence[Number], offset: Number | None) -> bool:
    """Whether a view reaches behind the end of the memory that `x` is known to lie in. (The storages of torch's
    fake tensors grow with every view of them, and do not tell.)"""
    if x.fake is None:
        return False
    begins = ctx.sizes.index(x.fake.storage_offset())
    start = begins if offset is None else ctx.index(offset)
    ends = [begins + extent(x.sizes, ctx.sizes.indices(x.fake.stride()))]
    if (found := strides_in_storage(ctx, x)) is not None:  # a view of the tensor that it is itself a part of
        whole_one = ctx.buffers[ctx.buffers[ctx.realise(x.box)].storage]
        ends.append(begins - found[1] + extent(whole_one.sizes, whole_one.strides))
    sizes = [ctx.index(item) for item in size]
    wanted = constant_value(start + extent(sizes, [ctx.index(item) for item in stride]))
    limits = [constant_value(end) for end in ends]
    return ZERO not in sizes and wanted is not None and all(limit is not None and limit < wanted for limit in limits)


def extent(sizes: Sequence[Index], strides: Sequence[Index]) -> Index:
    """How far it is from the first element to behind the last."""
    if ZERO in sizes:
        return ZERO
    steps = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    return sum(steps, start=number(1))


def as_eager(ctx: Builder, x: Value) -> Index | None:
    """Where `x` begins in its buffer's storage, if its elements lie there as eager's do."""
    found = strides_in_storage(ctx, x)
    if found is None or x.fake is None or not same_strides(x.sizes, found[0], ctx.sizes.indices(x.fake.stride())):
        return None
    return found[1]


def dense_copy(ctx: Builder, x: Value) -> Value:
    """The elements in memory of their own, with eager's strides."""
    if x.fake is None:
        raise NotLowered("a tensor whose strides are not known")
    strides = ctx.sizes.indices(x.fake.stride())
    if not is_dense(x.sizes, strides):
        raise NotLowered("a view of memory that is not laid out as in eager")
    return copied(ctx, x, strides)


def is_dense(sizes: Sequence[Index], strides: Sequence[Index]) -> bool:
    """Whether every place between the first and the last element is one element's."""
    left = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size is not ONE]
    step: Index = ONE
    while left:
        found = next((pair for pair in left if pair[1] is step), None)
        if found is None:
            return False
        left.remove(found)
        step = step * found[0]
    return True


def own_offset(ctx: Builder, x: Value) -> Index:
    assert x.fake is not None
    return ctx.index(x.fake.storage_offset())


def beginning(ctx: Builder, x: Value) -> Index:
    """Where our buffer begins in eager's storage: a tensor from outside may begin anywhere in its own."""
    if not is_from_outside(ctx, x):
        return ZERO
    buffer = ctx.buffers[ctx.buffers[ctx.realise(x.box)].storage]
    begins = symbol(f"{buffer.name}_offset", 0)
    if begins not in ctx.bound:
        ctx.bound.add(begins)
        ctx.add(Bind(begins, buffer.name, "offset", 0, ctx.origin))
    return begins


def is_from_outside(ctx: Builder, x: Value) -> bool:
    return ctx.buffers[ctx.buffers[ctx.realise(x.box)].storage].kind in ("input", "donated", "constant")


def view_of_storage(
    ctx: Builder, x: Value, dtype: torch.dtype, sizes: Sequence[Index], strides: Sequence[Index], offset: Index
) -> Value:
    buffer = ctx.buffers[ctx.realise(x.box)]
    box = Box(tuple(sizes), dtype, x.device, origins=(ctx.origin,))
    box.buffer = ctx.new_view(buffer, dtype, sizes, strides, offset)
    return whole(box)


@lowers(aten.as_strided_scatter.default, prims.as_strided_scatter.default)
def as_strided_scatter(
    ctx: Builder, x: Value, src: Value, size: Sequence[Number], stride: Sequence[Number], storage_offset: Number | None
) -> Value:
    # Eager copies the whole storage, of which the tensor may be a part, and writes where the offset says in it. Tracing
    # sees to it that the view ends within as many places as there are elements.
    outside = x.box.expr is None and is_from_outside(ctx, x)
    if outside or x.fake is None or not begins_its_storage(x.fake):
        raise NotLowered("a storage is written of which the tensor may be a part")
    sizes, strides = [ctx.index(item) for item in size], [ctx.index(item) for item in stride]
    copy = dense_copy(ctx, x)
    start = ctx.index(storage_offset or 0)
    write_into(ctx, view_of_storage(ctx, copy, x.dtype, sizes, strides, start), src)
    return copy


# --- bits -------------------------------------------------------------------------------------------------------------


@lowers(aten.view.dtype)
def view_dtype(ctx: Builder, x: Value, dtype: torch.dtype) -> Value:
    return reinterpreted(ctx, x, dtype)


@lowers(prims.view_of_dtype.default)
def view_of_dtype(ctx: Builder, a: Value, dtype: torch.dtype) -> Value:
    return reinterpreted(ctx, a, dtype)


def reinterpreted(ctx: Builder, x: Value, dtype: torch.dtype) -> Value:
    """The same bits as another type: of what is not in memory yet, element by element; else a view."""
    if dtype == x.dtype:
        return x.view(x.sizes, own_axes(x.sizes))
    if x.box.expr is not None and dtype.itemsize == x.dtype.itemsize:
        return ctx.lazy(x.sizes, op("bitcast", ctx.elements(x, x.sizes), dtype=dtype), x.device)
    start = as_eager(ctx, x)
    if start is None:
        x, start = dense_copy(ctx, x), ZERO
    offset = start * x.dtype.itemsize // dtype.itemsize
    return view_of_storage(ctx, x, dtype, ctx.out_sizes, ctx.sizes.indices(ctx.out.stride()), offset)


# --- a part replaced --------------------------------------------------------------------------------------------------
#
# Element by element: from the new part where the element lies in it, else from the old tensor or zero. Nothing is
# copied that the reader does not ask for.


class StridedPart:
    """A part of a tensor: when an element of the whole lies in it, and where there."""

    def __init__(self, condition: Expr, place: Sequence[Index]) -> None:
        self.condition, self.place = condition, place

    def over(self, ctx: Builder, new: Value, old: Value | None) -> Value:
        """The whole with `new` as the part; the rest is `old`, or zero."""
        sizes, dtype = ctx.out_sizes, ctx.out_dtype
        place = self.place[len(self.place) - new.rank :]
        inner = [ZERO if size is ONE else item for size, item in zip(new.sizes, place, strict=True)]
        value = cast(new.at(inner), dtype)
        blank = old is None or is_blank(ctx, old)
        other = const(0, dtype) if blank else cast(ctx.elements(old, sizes), dtype)  # type: ignore[arg-type]
        return ctx.lazy(sizes, guarded(self.condition, value, other), new.device)


def is_blank(ctx: Builder, x: Value) -> bool:
    """Whether a tensor is memory that nothing was written to: any element will do for its elements."""
    name = x.box.buffer
    if x.box.expr is not None or name is None or ctx.buffers[name].kind != "owned":
        return False
    written = (access.buffer for item in reversed(ctx.operations) for access in writes(item))
    return all(ctx.buffers[each].storage != name for each in written)


def slice_part(sizes: Sequence[Index], at: int, start: Index, end: Index, step: Index) -> StridedPart:
    axes = list(own_axes(sizes))
    away = axes[at] - start
    condition = every(at_least(axes[at], start), below(axes[at], end), divides(step, away))
    return StridedPart(condition, [*axes[:at], away // step, *axes[at + 1 :]])


def select_part(sizes: Sequence[Index], at: int, index: Index) -> StridedPart:
    axes = own_axes(sizes)
    return StridedPart(same(axes[at], index), [*axes[:at], *axes[at + 1 :]])


def diagonal_part(sizes: Sequence[Index], offset: int, dim1: int, dim2: int) -> StridedPart:
    first, second = dim_of(dim1, len(sizes)), dim_of(dim2, len(sizes))
    axes = own_axes(sizes)
    along = axes[first] - max(-offset, 0)
    rest = [item for k, item in enumerate(axes) if k not in (first, second)]
    starts = at_least(axes[first], number(max(-offset, 0)))
    return StridedPart(every(starts, same(axes[second], axes[first] + offset)), [*rest, along])


def require_fit(operator: Any, x: Value, src: Value, *given: Any) -> None:
    sizes, part = ([constant_value(size) for size in each.sizes] for each in (x, src))
    if eager_refuses(operator, sizes, part, given):
        raise NotLowered("the part that is written has other sizes, or is none: eager refuses it")


@lowers(aten.slice_scatter.default)
def slice_scatter(
    ctx: Builder, x: Value, src: Value, dim: int, start: Number | None, end: Number | None, step: Number
) -> Value:
    require_fit(aten.slice_scatter.default, x, src, dim, start, end, step)
    at = dim_of(dim, x.rank)
    size = x.sizes[at]
    begin = start_of(ctx, start, size)
    stop = size if end is None else clamped(from_the_end(ctx.index(end), size), size)
    return slice_part(x.sizes, at, begin, stop, ctx.index(step)).over(ctx, src, x)


@lowers(aten.slice_backward.default)
def slice_backward(
    ctx: Builder, grad_output: Value, input_sizes: Sequence[Number], dim: int, start: Number, end: Number, step: Number
) -> Value:
    sizes = ctx.out_sizes
    at = dim_of(dim, len(sizes))
    stop = clamped(from_the_end(ctx.index(end), sizes[at]), sizes[at])
    return slice_part(sizes, at, start_of(ctx, start, sizes[at]), stop, ctx.index(step)).over(ctx, grad_output, None)


@lowers(aten.select_scatter.default)
def select_scatter(ctx: Builder, x: Value, src: Value, dim: int, index: Number) -> Value:
    require_fit(aten.select_scatter.default, x, src, dim, index)
    if not x.rank:
        raise NotLowered("nothing can be selected from a tensor without dimensions: eager says so")
    at = dim_of(dim, x.rank)
    return select_part(x.sizes, at, selected_place(ctx, x, at, index)).over(ctx, src, x)


@lowers(aten.select_backward.default)
def select_backward(ctx: Builder, grad_output: Value, input_sizes: Sequence[Number], dim: int, index: Number) -> Value:
    sizes = ctx.out_sizes
    at = dim_of(dim, len(sizes))
    return select_part(sizes, at, from_the_end(ctx.index(index), sizes[at])).over(ctx, grad_output, None)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(ctx: Builder, x: Value, src: Value, offset: int, dim1: int, dim2: int) -> Value:
    require_fit(aten.diagonal_scatter.default, x, src, offset, dim1, dim2)
    return diagonal_part(x.sizes, offset, dim1, dim2).over(ctx, src, x)


@lowers(aten.diagonal_backward.default)
def diagonal_backward(
    ctx: Builder, grad_output: Value, input_sizes: Sequence[Number], offset: int, dim1: int, dim2: int
) -> Value:
    return diagonal_part(ctx.out_sizes, offset, dim1, dim2).over(ctx, grad_output, None)


@lowers(aten.unfold_backward.default)
def unfold_backward(
    ctx: Builder, grad_in: Value, input_sizes: Sequence[Number], dim: int, size: int, step: int
) -> Value:
    """Every element gathers from the windows it lies in."""
    sizes, dtype = ctx.out_sizes, ctx.out_dtype
    if not sizes:
        return ctx.lazy((), grad_in.at([ZERO] * grad_in.rank), grad_in.device)
    at = dim_of(dim, len(sizes))
    wide = arithmetic_type(dtype)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        turn = outer[at] // step - inner[0]
        within = outer[at] - turn * step
        place = [*outer[:at], turn, *outer[at + 1 :], within]
        valid = every(at_least(turn, ZERO), below(turn, grad_in.sizes[at]), below(within, number(size)))
        return cast(guarded(valid, grad_in.at(place), const(0, dtype)), wide)

    return gathered(ctx, sizes, [ctx.index(-(-size // step))], element, grad_in.device)


@lowers(aten.resize_as.default, aten.resize.default)
def resize(ctx: Builder, x: Value, **wanted: Any) -> Value:
    """A tensor that has the sizes already stays as it is; another needs other memory."""
    if ctx.out_sizes != x.sizes or wanted.get("memory_format") is not None:
        raise NotLowered("it changes what memory a tensor has")
    return ctx.lazy(x.sizes, ctx.elements(x, x.sizes), x.device)
