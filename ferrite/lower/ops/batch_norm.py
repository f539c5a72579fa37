"""Batch normalisation: statistics per channel, as exact as eager keeps them, then an expression.

On a CPU eager adds up single precision in double: batches of a few elements, whose deviations nearly cancel, need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, Expr, arithmetic_type, cast, const, op
from ferrite.lower.apply import compose
from ferrite.lower.builder import Builder
from ferrite.lower.memory import copied, in_memory
from ferrite.lower.ops.reduce import Rows, moments, statistics_type
from ferrite.lower.stores import write_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten


class Channels(Rows):
    """A value as one row per channel, its second dimension."""

    def __init__(self, ctx: Builder, x: Value) -> None:
        if x.rank < 2:
            raise NotLowered("no dimension for channels")
        super().__init__(ctx, x, [dim for dim in range(x.rank) if dim != 1], False)
        self.wide, self.exact = arithmetic_type(x.dtype), statistics_type(x.dtype, x.device)

    def refuse_nothing(self) -> None:
        """Statistics are of something."""
        if any(size.low == 0 for size in self.x.sizes):
            raise NotLowered("a batch that may be empty")

    def all(self, row: Value, dtype: torch.dtype | None = None) -> Expr:
        """What a channel has, at every element of the value."""
        place = [own_axes(self.x.sizes)[1]] if row.sizes[0] is not ONE else [ZERO]
        return cast(row.at(place), dtype or self.wide)

    def kept(self, expr: Expr, dtype: torch.dtype) -> Value:
        """A number per channel, in memory: every element of the channel reads it."""
        return in_memory(self.ctx, self.lazy(expr, dtype))

    def number(self, value: Any) -> Expr:
        return cast(self.ctx.elements(value, ()), self.exact)


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    ctx: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Value, ...]:
    if not training:
        results = batch_norm_as_learnt(ctx, x, weight, bias, running_mean, running_var, momentum, eps)
        return *results, *(copied(ctx, each) for each in (running_mean, running_var))
    channels = Channels(ctx, x)
    results, mean, deviations = normalised(channels, weight, bias, eps)
    spread = op("div", deviations, op("sub", channels.float_count(channels.exact), const(1, channels.exact)))
    share = channels.number(momentum)
    updated = []
    for old, new in ((running_mean, mean), (running_var, spread)):
        rest = op("mul", op("sub", const(1, channels.exact), share), cast(channels.of(old), channels.exact))
        updated.append(channels.lazy(op("add", op("mul", share, new), rest), old.dtype))
    return *results, *updated


@lowers(aten._native_batch_norm_legit.default)
def batch_norm_in_place(
    ctx: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Value, ...]:
    """The running statistics are written while training, and only then."""
    if not training:
        return batch_norm_as_learnt(ctx, x, weight, bias, running_mean, running_var, momentum, eps)
    *results, mean, variance = batch_norm(ctx, x, weight, bias, running_mean, running_var, True, momentum, eps)
    write_into(ctx, running_mean, mean)
    write_into(ctx, running_var, variance)
    return tuple(results)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_alone(
    ctx: Builder, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: Any, eps: Any
) -> tuple[Value, ...]:
    return normalised(Channels(ctx, x), weight, bias, eps)[0]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_as_learnt(
    ctx: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Any,
    eps: Any,
) -> tuple[Value, ...]:
    channels = Channels(ctx, x)
    variance = cast(channels.of(running_var), channels.exact)
    return applied(channels, running_mean, variance, weight, bias, eps)


def normalised(
    channels: Channels, weight: Value | None, bias: Value | None, eps: Any
) -> tuple[tuple[Value, ...], Expr, Expr]:
    """The result with its statistics, and per channel the mean and the sum of squared deviations."""
    channels.refuse_nothing()
    mean, deviations = moments(channels, channels.exact)
    variance = op("div", deviations, channels.float_count(channels.exact))
    means = channels.kept(mean, channels.wide)
    return applied(channels, means, variance, weight, bias, eps), mean, deviations


def applied(
    channels: Channels, means: Value, variance: Expr, weight: Value | None, bias: Value | None, eps: Any
) -> tuple[Value, ...]:
    """The normalised elements, and what is kept for the gradient: nothing, where torch keeps nothing."""
    ctx, x, wide, exact = channels.ctx, channels.x, channels.wide, channels.exact
    scale: Expr = op("div", const(1, exact), op("sqrt", op("add", variance, channels.number(eps))))
    scales = channels.kept(scale, wide)
    if weight is not None:
        scale = op("mul", scale, cast(channels.of(weight), exact))
    away = op("sub", cast(ctx.elements(x, x.sizes), wide), channels.all(means))
    # few roundings for each element: what a channel has in common is rounded once, and normalised away further on
    factor = channels.all(scales if weight is None else channels.kept(scale, wide))
    value = op("mul", away, factor) if bias is None else op("fma", away, factor, channels.all(bias))
    results = [ctx.lazy(x.sizes, cast(value, x.dtype), x.device)]
    for each, fake in zip((means, scales), ctx.out[1:3], strict=True):
        empty = ctx.shape(fake) == (ZERO,)
        results.append(ctx.fill((ZERO,), 0, fake.dtype, x.device) if empty else ctx.convert(each, fake.dtype))
    return tuple(results)


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    ctx: Builder,
    grad_out: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Of the input: (g - mean(g) - (x - mean) * mean(g*(x - mean)) / deviation^2) * weight / deviation."""
    if not train or save_mean is None or save_invstd is None:
        args = (grad_out, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)
        return compose(ctx, aten.native_batch_norm_backward.default, args, {}, ctx.out)
    channels = Channels(ctx, x)
    channels.refuse_nothing()
    wide, exact, count = channels.wide, channels.exact, channels.float_count(channels.exact)
    given = cast(ctx.elements(grad_out, x.sizes), wide)
    away = op("sub", cast(ctx.elements(x, x.sizes), wide), channels.all(save_mean))
    sums = [total(ctx, x, term, exact) for term in (given, op("mul", given, away))]
    scale = cast(channels.of(save_invstd), exact)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        mean = channels.kept(op("div", channels.of(sums[0]), count), wide)
        slope = op("mul", op("div", channels.of(sums[1]), count), op("mul", scale, scale))
        factor = op("mul", scale, cast(channels.of(weight), exact)) if weight is not None else scale
        less = channels.all(channels.kept(op("neg", slope), wide))
        inside = op("fma", away, less, op("sub", given, channels.all(mean)))
        value = op("mul", inside, channels.all(channels.kept(factor, wide)))
        results[0] = ctx.lazy(x.sizes, cast(value, x.dtype), x.device)
    kept = weight.dtype if weight is not None else x.dtype
    if output_mask[1]:
        results[1] = channels.lazy(op("mul", channels.of(sums[1]), scale), kept)
    if output_mask[2]:
        results[2] = channels.lazy(channels.of(sums[0]), kept)
    return tuple(results)


def total(ctx: Builder, x: Value, term: Expr, exact: torch.dtype) -> Value:
    """The sum of a term over each channel, in memory."""
    rows = Channels(ctx, ctx.lazy(x.sizes, term, x.device))
    return in_memory(ctx, rows.one("sum", rows.element(exact), exact))
