"""Tensors made of nothing: constants, ranges, and memory without contents; copies and conversions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators, torch_state
from ferrite.errors import NotLowered
from ferrite.ir import ZERO, Expr, Index, arithmetic_type, cast, const, foldable, index_value, is_integer, op, short
from ferrite.ir.program import Buffer, DeviceCopy
from ferrite.lower.builder import Builder
from ferrite.lower.formula import Term, choose, first_device
from ferrite.lower.memory import buffer_of, dense_strides, wanted_strides
from ferrite.lower.table import lowers
from ferrite.lower.value import Box, Value, own_axes, whole

aten, prims = torch.ops.aten, torch.ops.prims


# --- constants --------------------------------------------------------------------------------------------------------


def filled(ctx: Builder, value: Any) -> Value:
    """A result that is one number everywhere."""
    if isinstance(value, (Value, Expr, Index)):
        element = cast(ctx.elements(value, ()), ctx.out_dtype)
    else:
        element = number(value, ctx.out_dtype)
    return ctx.lazy(ctx.out_sizes, element, first_device(ctx))


def number(value: Any, dtype: torch.dtype) -> Expr:
    """A Python number in a type, where that is known; else the conversion of one."""
    kind = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}[type(value)]
    if kind is torch.int64 and not -(1 << 63) <= value < 1 << 63:
        return const(value, dtype)
    return cast(const(value, kind), dtype)


def _constant(value: int, *operators: Any) -> None:
    @lowers(*operators)
    def lower(ctx: Builder, **args: Any) -> Value:
        return filled(ctx, value)


_constant(0, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
_constant(0, aten._efficientzerotensor.default)
_constant(1, aten.ones.default, aten.ones_like.default, aten.new_ones.default)


@lowers(aten.full.default, aten.full_like.default, aten.new_full.default, prims.full.default, prims.full_like.default)
def full(ctx: Builder, fill_value: Any, **args: Any) -> Value:
    return filled(ctx, fill_value)


@lowers(aten.fill.Scalar, aten.fill.Tensor, prims.fill.default)
def fill(ctx: Builder, x: Value, value: Any) -> Value:
    return filled(ctx, value)


@lowers(aten.scalar_tensor.default, prims.scalar_tensor.default)
def scalar_tensor(ctx: Builder, s: Any, **args: Any) -> Value:
    return filled(ctx, s)


# --- memory without contents ------------------------------------------------------------------------------------------


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    prims.empty.default,
    prims.empty_strided.default,
    prims.empty_permuted.default,
)
def empty(ctx: Builder, **args: Any) -> Value:
    """Nothing is computed. Pinned memory is for eager to find."""
    if args.get("pin_memory"):
        raise NotLowered("pinned memory")
    box = Box(ctx.out_sizes, ctx.out_dtype, first_device(ctx), origins=(ctx.origin,))
    if dense_strides(ctx, ctx.out) is None and ZERO not in box.sizes:
        raise NotLowered("elements that share memory")
    box.buffer = ctx.new_buffer(box, ctx.sizes.indices(ctx.out.stride()))
    return whole(box)


# --- ranges -----------------------------------------------------------------------------------------------------------


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(ctx: Builder, start: Any = 0, end: Any = None, step: Any = 1, **args: Any) -> Value:
    """start + i * step, in the type torch counts in: whole numbers in 64 bits, floats in double precision."""
    (place,) = own_axes(ctx.out_sizes)
    dtype = ctx.out_dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bool):
        raise NotLowered(f"a range of {short(dtype)}, which eager refuses")
    if all(isinstance(item, (int, Index)) for item in (start, step)) and is_integer(dtype):
        value = index_value(ctx.index(start) + place * ctx.index(step))
        return ctx.lazy(ctx.out_sizes, cast(value, dtype), first_device(ctx))
    kind = torch.int64 if is_integer(dtype) else torch.float64
    first, each = (Term(cast(ctx.elements(item, ()), kind)) for item in (start, step))
    made = first + Term(cast(index_value(place), kind)) * each
    return ctx.lazy(ctx.out_sizes, cast(made.expr, dtype), first_device(ctx))


@lowers(prims.iota.default)
def iota(ctx: Builder, length: Any, start: Any, step: Any, **args: Any) -> Value:
    (place,) = own_axes(ctx.out_sizes)
    value = index_value(ctx.index(start) + place * ctx.index(step))
    return ctx.lazy(ctx.out_sizes, cast(value, ctx.out_dtype), first_device(ctx))


@lowers(aten.eye.default, aten.eye.m)
def eye(ctx: Builder, **args: Any) -> Value:
    row, column = (index_value(item) for item in own_axes(ctx.out_sizes))
    return ctx.lazy(ctx.out_sizes, cast(op("eq", row, column, dtype=torch.bool), ctx.out_dtype), first_device(ctx))


def _triangle(name: str, keep: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(ctx: Builder, x: Value, diagonal: Any) -> Value:
        *_, row, column = own_axes(x.sizes)
        inside = op(keep, index_value(column - row), index_value(ctx.index(diagonal)), dtype=torch.bool)
        value = Term(ctx.elements(x, x.sizes))
        return ctx.lazy(x.sizes, choose(Term(inside), value, 0).expr, x.device)


_triangle("tril", "le")
_triangle("triu", "ge")


# --- copies and conversions -------------------------------------------------------------------------------------------


MAX_LITERAL_ELEMENTS = 8


@lowers(aten.lift_fresh_copy.default)
def literal(ctx: Builder, x: Value) -> Value:
    """A tensor written in the model: a number, or a few even steps, needs no memory to be read from."""
    found = ctx.objects.get(x.box.buffer or "")
    if isinstance(found, torch.Tensor) and x.is_whole and small_literal(found):
        with torch_state.on_real_tensors():
            numbers = found.flatten().tolist()
        first, *others = {const(each, x.dtype) for each in numbers}
        if not others:
            return ctx.lazy(x.sizes, first, x.device)
        steps = {later - each for each, later in itertools.pairwise(numbers)}
        if is_integer(x.dtype) and len(steps) == 1:
            place = own_axes(x.sizes)[0] * steps.pop() + numbers[0]
            return ctx.lazy(x.sizes, cast(index_value(place), x.dtype), x.device)
    return copied(ctx, x)


def small_literal(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not torch_api.is_fake(tensor)
        and tensor.layout is torch.strided
        and tensor.dim() <= 1
        and 0 < tensor.numel() <= MAX_LITERAL_ELEMENTS
        and foldable(tensor.dtype)
        and tensor.dtype is not torch.complex32
    )


@lowers(aten.lift.default, aten.alias_copy.default)
def copied(ctx: Builder, x: Value) -> Value:
    return ctx.lazy(x.sizes, ctx.elements(x, x.sizes), x.device)


@lowers(aten._to_copy.default)
def to_copy(ctx: Builder, x: Value | Any, non_blocking: bool, **args: Any) -> Value:
    if args.get("pin_memory"):
        raise NotLowered("pinned memory")
    if not isinstance(x, Value):  # a number, where torch takes one for a tensor
        return filled(ctx, x)
    converted = ctx.convert(x, ctx.out_dtype)
    if ctx.out.device == x.device:
        return ctx.lazy(x.sizes, ctx.elements(converted, x.sizes), x.device)
    return moved(ctx, converted, ctx.out.device, non_blocking)


@lowers(prims.device_put.default)
def device_put(ctx: Builder, a: Value, device: Any, non_blocking: bool) -> Value:
    return copied(ctx, a) if ctx.out.device == a.device else moved(ctx, a, ctx.out.device, non_blocking)


def rehomed(ctx: Builder, x: Value, constant: Buffer, device: torch.device) -> Value:
    name = f"{constant.name}_{str(device).replace(':', '_')}"
    if name not in ctx.buffers:
        ctx.objects[name] = torch_operators.on_device(ctx.objects[constant.name], device)
        ctx.buffers[name] = replace(constant, name=name, device=device)
    return whole(Box(x.sizes, x.dtype, device, buffer=name))


def moved(ctx: Builder, x: Value, device: torch.device, non_blocking: bool) -> Value:
    """The same elements in memory of another device; a constant is moved once, while compiling."""
    constant = ctx.buffers.get(x.box.buffer or "")
    if constant is not None and constant.kind == "constant" and x.is_whole:
        return rehomed(ctx, x, constant, device)
    source = buffer_of(ctx, x)
    box = Box(x.sizes, x.dtype, device, origins=(ctx.origin,))
    box.buffer = ctx.new_buffer(box, wanted_strides(ctx, 0, x.sizes))
    ctx.add(DeviceCopy(source, box.buffer, not non_blocking, ctx.origin))
    return whole(box)


@lowers(aten.copy.default)
def copy(ctx: Builder, x: Value, src: Value | Any, non_blocking: bool) -> Value:
    """The elements of `src`, broadcast, in the type and memory of x. `x.copy_(1)` gives a number."""
    element = cast(ctx.elements(src, x.sizes), x.dtype)
    if isinstance(src, Value) and src.device != x.device and src.rank:
        return moved(ctx, ctx.lazy(x.sizes, element, src.device), x.device, non_blocking)
    return ctx.lazy(x.sizes, element, x.device)


def linear(ctx: Builder, start: Any, end: Any, steps: Any) -> Term:
    """Places between two ends, from the nearer one, so that both ends are met exactly."""
    dtype = ctx.out_dtype
    kind = torch.float64 if is_integer(dtype) else arithmetic_type(dtype)
    (place,) = own_axes(ctx.out_sizes)
    count = ctx.index(steps)
    first, last = (Term(cast(ctx.elements(item, ()), kind)) for item in (start, end))
    step = (last - first) / Term(cast(index_value(count - 1), kind))
    here, back = (Term(cast(index_value(item), kind)) for item in (place, count - place - 1))
    near = Term(op("lt", index_value(place), index_value(count // 2), dtype=torch.bool))
    return choose(near, first + step * here, last - step * back)


@lowers(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(ctx: Builder, start: Any, end: Any, steps: Any, **args: Any) -> Value:
    if isinstance(steps, int) and steps <= 1:
        return filled(ctx, start)
    if ctx.index(steps).low is None or ctx.index(steps).low < 2:  # type: ignore[operator]
        raise NotLowered("a number of steps that may be one")
    return ctx.lazy(ctx.out_sizes, cast(linear(ctx, start, end, steps).expr, ctx.out_dtype), first_device(ctx))
