"""Softmax and normalisation: a pass over each row for its statistics, then an expression per element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, Expr, Index, arithmetic_type, cast, const, op
from ferrite.lower.builder import Builder
from ferrite.lower.ops.reduce import Rows, moments
from ferrite.lower.ops.views import reshaped
from ferrite.lower.table import lowers, lowers_later
from ferrite.lower.value import Value

aten = torch.ops.aten


def along(ctx: Builder, x: Value, dim: Any) -> Rows:
    """Rows of a value that keep the reduced dimensions, with size one, so that they broadcast back."""
    return Rows(ctx, x, dim if isinstance(dim, (list, tuple)) else [dim], True)


def spread_out(ctx: Builder, row: Value, x: Value) -> Expr:
    return ctx.elements(row, x.sizes)


def softmax_parts(ctx: Builder, x: Value, dim: int, wide: torch.dtype) -> tuple[Expr, Value]:
    """The element less the greatest of its row, and the sum of exponentials of that."""
    if not wide.is_floating_point:
        raise NotLowered("eager has it for whole numbers only where there are none")
    rows = along(ctx, x, dim)
    greatest, total = rows.reduce("softmax", rows.element(wide), wide, wide)
    element = cast(ctx.elements(x, x.sizes), wide)
    return op("sub", element, spread_out(ctx, greatest, x)), total


@lowers(aten._softmax.default)
def softmax(ctx: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    wide = arithmetic_type(ctx.out_dtype)
    shifted, total = softmax_parts(ctx, x, dim, wide)
    value = op("div", op("exp", shifted), spread_out(ctx, total, x))
    return ctx.lazy(x.sizes, cast(value, ctx.out_dtype), x.device)


@lowers(aten._log_softmax.default)
def log_softmax(ctx: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    wide = arithmetic_type(ctx.out_dtype)
    shifted, total = softmax_parts(ctx, x, dim, wide)
    value = op("sub", shifted, op("log", spread_out(ctx, total, x)))
    return ctx.lazy(x.sizes, cast(value, ctx.out_dtype), x.device)


@lowers_later("ferrite.prepare_softmax_online.default")
def softmax_statistics(ctx: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    """The greatest of each row, and the sum of exponentials of what the elements are less than that."""
    wide = arithmetic_type(x.dtype)
    rows = along(ctx, x, dim).none_empty()
    greatest, total = rows.reduce("softmax", rows.element(wide), x.dtype, x.dtype)
    return greatest, total


@lowers(aten._softmax_backward_data.default)
def softmax_backward(ctx: Builder, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    wide = arithmetic_type(grad_output.dtype)
    product = product_of(ctx, grad_output, output, wide)
    rows = along(ctx, product, dim)
    total = rows.one("sum", rows.element(wide), wide)
    given, out = (cast(ctx.elements(each, output.sizes), wide) for each in (grad_output, output))
    value = op("mul", out, op("sub", given, spread_out(ctx, total, output)))
    return ctx.lazy(output.sizes, cast(value, ctx.out_dtype), output.device)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(ctx: Builder, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    wide = arithmetic_type(grad_output.dtype)
    rows = along(ctx, grad_output, dim)
    total = rows.one("sum", rows.element(wide), wide)
    given, out = (cast(ctx.elements(each, output.sizes), wide) for each in (grad_output, output))
    value = op("sub", given, op("mul", op("exp", out), spread_out(ctx, total, output)))
    return ctx.lazy(output.sizes, cast(value, ctx.out_dtype), output.device)


def product_of(ctx: Builder, left: Value, right: Value, dtype: torch.dtype) -> Value:
    parts = (cast(ctx.elements(each, left.sizes), dtype) for each in (left, right))
    return ctx.lazy(left.sizes, op("mul", *parts), left.device)


# --- layer norm -------------------------------------------------------------------------------------------------------


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    ctx: Builder, x: Value, normalized_shape: Sequence[Any], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    wide, kept = arithmetic_type(x.dtype), ctx.out[1].dtype
    rows = Rows(ctx, x, list(range(x.rank - len(normalized_shape), x.rank)), True)
    mean, deviations = moments(rows, wide)
    variance = op("div", deviations, rows.float_count(wide))
    scale = op("rsqrt", op("add", variance, const(eps, wide)))
    means, scales = rows.lazy(mean, wide), rows.lazy(scale, wide)
    value = cast(ctx.elements(x, x.sizes), wide)
    value = op("mul", op("sub", value, ctx.elements(means, x.sizes)), ctx.elements(scales, x.sizes))
    for each, name in ((weight, "mul"), (bias, "add")):
        if each is not None:
            value = op(name, value, cast(ctx.elements(each, x.sizes), wide))
    if bias is None and x.device.type == "cpu":
        value = op("add", value, const(0.0, wide))  # as eager has it: -0.0 is no result of its kernel
    result = ctx.lazy(x.sizes, cast(value, ctx.out_dtype), x.device)
    return result, ctx.convert(means, kept), ctx.convert(scales, kept)


@lowers(aten.native_group_norm.default)
def native_group_norm(
    ctx: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    wide, kept = arithmetic_type(x.dtype), ctx.out[1].dtype
    channels = ctx.index(C) // group
    sizes = (ctx.index(N), ctx.index(group), channels, ctx.index(HxW))
    rows = Rows(ctx, reshaped(x, sizes), [2, 3], True)
    mean, deviations = moments(rows, wide)
    scale = op("rsqrt", op("add", op("div", deviations, rows.float_count(wide)), const(eps, wide)))
    means, scales = rows.lazy(mean, wide), rows.lazy(scale, wide)
    value = op(
        "mul", op("sub", converted(ctx, rows.x, sizes, wide), ctx.elements(means, sizes)), ctx.elements(scales, sizes)
    )
    for each, name in ((weight, "mul"), (bias, "add")):
        if each is not None:
            value = op(name, value, converted(ctx, reshaped(each, (ONE, sizes[1], channels, ONE)), sizes, wide))
    if bias is None and weight is not None and x.device.type == "cpu":
        value = op("add", value, const(0.0, wide))  # likewise, but for what has no weight either
    result = reshaped(ctx.lazy(sizes, cast(value, ctx.out_dtype), x.device), x.sizes)
    found = [reshaped(ctx.convert(each, kept), sizes[:2]) for each in (means, scales)]
    return result, found[0], found[1]


def converted(ctx: Builder, value: Value, sizes: Sequence[Index], dtype: torch.dtype) -> Expr:
    return cast(ctx.elements(value, sizes), dtype)


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    ctx: Builder,
    grad_out: Value,
    x: Value,
    normalized_shape: Sequence[Any],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    """Of the input: (g*w - mean(g*w) - z*mean(g*w*z)) / deviation, where z is the normalised input."""
    wide = arithmetic_type(x.dtype)
    inner = len(normalized_shape)
    dims = list(range(x.rank - inner, x.rank))

    def at(value: Value) -> Expr:
        return cast(ctx.elements(value, x.sizes), wide)

    given = at(grad_out)
    normal = op("mul", op("sub", at(x), at(mean)), at(rstd))
    grads: list[Value | None] = [None, None, None]
    if output_mask[0]:
        weighted = ctx.lazy(x.sizes, op("mul", given, at(weight)) if weight is not None else given, x.device)
        moved = ctx.lazy(x.sizes, op("mul", at(weighted), normal), x.device)
        means = []
        for value in (weighted, moved):
            rows = Rows(ctx, value, dims, True)
            total = rows.one("sum", rows.element(wide), wide)
            means.append(op("div", ctx.elements(total, x.sizes), rows.float_count(wide)))
        inside = op("sub", op("sub", at(weighted), means[0]), op("mul", normal, means[1]))
        grads[0] = ctx.lazy(x.sizes, cast(op("mul", at(rstd), inside), x.dtype), x.device)
    for place, term in ((1, op("mul", given, normal)), (2, given)):
        kept = weight if place == 1 else bias
        if output_mask[place] and kept is not None:
            rows = Rows(ctx, ctx.lazy(x.sizes, term, x.device), list(range(x.rank - inner)) or [], False)
            if x.rank == inner:
                grads[place] = ctx.lazy(x.sizes, cast(term, kept.dtype), x.device)
            else:
                grads[place] = rows.one("sum", rows.element(wide), kept.dtype)
    return tuple(grads)
