"""The negative log likelihood of classes, and a gradient; other losses are elementwise, and stand with their family."""

from __future__ import annotations

import torch

from ferrite.ir import Expr, arithmetic_type, cast, const, index_value, op
from ferrite.lower.builder import Builder
from ferrite.lower.formula import Term, exp, pointwise
from ferrite.lower.memory import element_at
from ferrite.lower.ops.index import checked
from ferrite.lower.ops.reduce import Rows
from ferrite.lower.ops.views import total
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
I64, B8 = torch.int64, torch.bool
WRONG_CLASS = "IndexError: Target {index} is out of bounds."
NONE, MEAN = 0, 1  # what `reduction` means


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ctx: Builder, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    """Less the score of the class each target names, times the weight of that class; ignored targets count nothing."""
    wide = arithmetic_type(x.dtype)
    rows = x.sizes[:0] if x.rank == 1 else target.sizes
    axes = own_axes(rows)
    named = cast(target.at(own_axes(target.sizes)), I64)
    ignored = op("eq", named, cast(ctx.elements(ignore_index, ()), I64), dtype=B8)
    dim = 0 if x.rank == 1 else 1
    kept = op("where", ignored, const(0, I64), named, dtype=I64)
    place = checked(kept, x.sizes[dim], WRONG_CLASS)
    score = element_at(ctx, x, [place] if x.rank == 1 else [axes[0], place, *axes[1:]])
    factor: Expr = const(1.0, wide) if weight is None else cast(element_at(ctx, weight, [place]), wide)
    zero = const(0.0, wide)
    factor = op("where", ignored, zero, factor, dtype=wide)
    value = op("where", ignored, zero, op("neg", op("mul", cast(score, wide), factor)), dtype=wide)
    losses = ctx.lazy(rows, value, x.device)
    if reduction == NONE and x.rank > 1:
        return ctx.convert(losses, x.dtype), ctx.fill((), 0.0, ctx.out[1].dtype, x.device)
    totals = []
    for each in (losses, ctx.lazy(rows, factor, x.device)):
        all_of_it = Rows(ctx, each, None, False)
        totals.append(all_of_it.one("sum", all_of_it.element(wide), wide))
    loss, count = (ctx.elements(total, ()) for total in totals)
    loss = op("div", loss, count) if reduction == MEAN else loss
    return tuple(ctx.lazy((), cast(each, x.dtype), x.device) for each in (loss, count))  # type: ignore[return-value]


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(ctx: Builder, grad_output: Value, x: Value, target: Value, reduction: int) -> Value:
    """With the exponential itself: one less a sigmoid near one has no digits left."""

    def slope(grad: Term, x: Term, target: Term) -> Term:
        grown = exp(-(target * x))
        steep = -(target * grown)
        if reduction == MEAN:
            steep = steep / Term(cast(index_value(total(ctx.out_sizes)), x.dtype))
        return steep / (grown + 1) * grad

    return pointwise(ctx, slope, grad_output, x, target, takes="float")
