"""Complex numbers: their parts, and the views between pairs of floats and complex numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, arithmetic_type, index_value, is_integer, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.conj_and_neg import read_as
from ferrite.lower.formula import Term, choose, first_device, is_nan, pointwise, result, term
from ferrite.lower.memory import strides_in_storage
from ferrite.lower.ops.pointwise import real_type, same
from ferrite.lower.table import lowers
from ferrite.lower.value import Box, Value, own_axes, whole

aten, prims = torch.ops.aten, torch.ops.prims


def part(ctx: Builder, x: Value, name: str) -> Term:
    """The real or imaginary part, in the type of the parts."""
    wide = arithmetic_type(x.dtype)
    return term(ctx, x, wide).call(name, dtype=real_type(wide)).to(real_type(x.dtype))


# --- conjugates -------------------------------------------------------------------------------------------------------


@lowers(aten._conj.default)
def conjugate_view(ctx: Builder, x: Value | complex) -> Value:
    if not isinstance(x, Value):  # torch 2.11 hands over numbers here
        return conjugate(ctx, x)
    return read_as(ctx, x, "conj") if x.dtype.is_complex else x.view(x.sizes, own_axes(x.sizes))


@lowers(aten._neg_view.default)
def negative_view(ctx: Builder, x: Value) -> Value:
    return read_as(ctx, x, "neg")


@lowers(
    aten.conj_physical.default,
    aten._conj_physical.default,
    prims.conj.default,
    prims.conj_physical.default,
)
def conjugate(ctx: Builder, x: Value | complex | None = None, a: Value | None = None) -> Value:
    value: Any = x if x is not None else a
    if not isinstance(value, Value):
        return ctx.fill(ctx.out_sizes, complex(value).conjugate(), ctx.out_dtype, ctx.out.device)
    if not value.dtype.is_complex:
        return same(ctx, value)
    return pointwise(ctx, lambda z: z.call("conj"), value)


@lowers(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(ctx: Builder, x: Value) -> Value:
    return x.view(x.sizes, own_axes(x.sizes))


# --- parts ------------------------------------------------------------------------------------------------------------


@lowers(prims.real.default)
def real(ctx: Builder, x: Value) -> Value:
    return result(ctx, part(ctx, x, "real")) if x.dtype.is_complex else same(ctx, x)


@lowers(prims.imag.default)
def imag(ctx: Builder, x: Value) -> Value:
    return result(ctx, part(ctx, x, "imag"))


@lowers(aten.complex.default)
def complex_(ctx: Builder, real: Value, imag: Value) -> Value:
    if real.dtype != imag.dtype:
        raise NotLowered("parts of two types: eager refuses them")
    wide = arithmetic_type(ctx.out_dtype)
    parts = [term(ctx, item, real_type(wide)) for item in (real, imag)]
    return result(ctx, parts[0].call("complex", parts[1], dtype=wide))


@lowers(aten.polar.default)
def polar(ctx: Builder, abs: Value, angle: Value) -> Value:
    if abs.dtype != angle.dtype:
        raise NotLowered("parts of two types: eager refuses them")
    wide = arithmetic_type(ctx.out_dtype)
    length, turn = (term(ctx, item, real_type(wide)) for item in (abs, angle))
    return result(ctx, (length * turn.call("cos")).call("complex", length * turn.call("sin"), dtype=wide))


@lowers(aten.angle.default)
def angle(ctx: Builder, x: Value) -> Value:
    """Of a real number: 0, or pi where it is negative, and NaN stays."""
    if x.dtype.is_complex:
        wide = arithmetic_type(x.dtype)
        return result(ctx, term(ctx, x, wide).call("angle", dtype=real_type(wide)))
    wide = arithmetic_type(ctx.out_dtype)
    if is_integer(x.dtype):
        return result(ctx, choose(term(ctx, x, torch.int64) < 0, Term(op("neg", term(ctx, -math.pi, wide).expr)), 0.0))
    value = term(ctx, x, wide)
    return result(ctx, choose(is_nan(value), value, choose(value < 0, math.pi, value.like(0.0))))


# --- views ------------------------------------------------------------------------------------------------------------


def reinterpreted(ctx: Builder, x: Value, sizes: Any, scale: tuple[int, int], last: bool) -> Value | None:
    """A view of memory that is there, of other elements: strides and offset counted anew."""
    if x.box.expr is not None:
        return None
    found = strides_in_storage(ctx, x)
    if found is None:
        return None
    strides, offset = found
    up, down = scale
    if last:
        strides = strides[:-1]
    new = [stride * up // number(down) for stride in strides] + ([] if last else [ONE])
    assert x.box.buffer is not None
    name = ctx.new_view(ctx.buffers[x.box.buffer], ctx.out_dtype, sizes, new, offset * up // number(down))
    box = Box(tuple(sizes), ctx.out_dtype, x.device, buffer=name)
    return whole(box)


@lowers(aten.view_as_real.default)
def view_as_real(ctx: Builder, x: Value) -> Value:
    sizes = ctx.out_sizes
    seen = reinterpreted(ctx, x, sizes, (2, 1), last=False)
    if seen is not None:
        return seen
    *place, which = own_axes(sizes)
    wide = arithmetic_type(x.dtype)
    whole_number = Term(x.at(place)).to(wide)
    first = Term(op("eq", index_value(which), index_value(ZERO), dtype=torch.bool))
    parts = [whole_number.call(name, dtype=real_type(wide)).to(ctx.out_dtype) for name in ("real", "imag")]
    return ctx.lazy(sizes, choose(first, *parts).expr, first_device(ctx))


@lowers(aten.view_as_complex.default)
def view_as_complex(ctx: Builder, x: Value) -> Value:
    sizes = ctx.out_sizes
    seen = reinterpreted(ctx, x, sizes, (1, 2), last=True)
    if seen is not None:
        return seen
    wide = arithmetic_type(ctx.out_dtype)
    real, imag = (Term(x.at([*own_axes(sizes), item])).to(real_type(wide)) for item in (ZERO, ONE))
    return ctx.lazy(sizes, real.call("complex", imag, dtype=wide).to(ctx.out_dtype).expr, first_device(ctx))
