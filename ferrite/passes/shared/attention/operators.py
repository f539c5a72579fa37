"""Attention on a CPU with a mask that may leave nothing of a row, for training: `ferrite::masked_attention`.

The kernel of torch goes backward from the logarithm of each row's sum. Where a number far below was added everywhere
that is this number again, or nearly, whatever the sum was, and the gradients are wrong: n times as large with -1e9 and
n keys. For rows of minus infinity it has zeros where eager has nan. Such rows are rare. So the mask is looked at when
it is there: without one the kernel runs, with one the gradients are computed as eager computes them. Scores that were
overwritten get none, as in eager.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.passes.shared.library import define, differentiate

aten = torch.ops.aten
# Nothing that a score can be changes this number when it is added to it.
MASKED_BIAS = -1e30
# From here on the logarithm of a sum loses digits that the gradients need.
LOW_BIAS = -1e4
Tensor = torch.Tensor


def look_of_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, filled: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, attn_mask=bias, scale=scale
    )
    return result


@define(
    "masked_attention(Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? filled, float scale)"
    " -> (Tensor, Tensor)",
    look_of_attention,
)
def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, filled: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale * query @ key + bias) @ value, and the logarithm of each row's sum.

    `filled`: which scores the bias stands in the place of.
    """
    result, sums = look_of_attention(query, key, value, bias, filled, scale)
    endless = (bias == -math.inf).all(-1, keepdim=True)
    return result.masked_fill_(endless, math.nan) if endless.any() else result, sums


def kernel_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    result: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        gradient, query, key, value, result, sums, 0.0, False, attn_mask=bias, scale=scale
    )
    return found


def look_of_gradients(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `masked_attention_backward` has them."""
    gradient, query, key, value, bias, _filled, result, sums, scale, for_bias = operands
    of_three = kernel_gradients(gradient, query, key, value, bias, result, sums, scale)
    return (*of_three, torch.empty_like(bias) if for_bias else bias.new_empty(0))


@define(
    "masked_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? filled, "
    "Tensor result, Tensor sums, float scale, bool for_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    look_of_gradients,
)
def masked_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    filled: Tensor | None,
    result: Tensor,
    sums: Tensor,
    scale: float,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; of the bias, too, if asked for."""
    if for_bias or (bias <= LOW_BIAS).all(-1).any():
        return written_out(gradient, query, key, value, bias, filled, scale, for_bias)
    return (*kernel_gradients(gradient, query, key, value, bias, result, sums, scale), bias.new_empty(0))


def written_out(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    filled: Tensor | None,
    scale: float,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients as eager has them, step by step; in half precision computed in single."""
    wide = torch.promote_types(query.dtype, torch.float32)
    times = query.shape[1] // key.shape[1]  # so many heads of queries share one of keys
    given, q, k, v = (each.to(wide) for each in (gradient, query, key, value))
    k, v = (each.repeat_interleave(times, 1) if times > 1 else each for each in (k, v))
    weights = (q @ k.mT * scale + bias).softmax(-1)
    of_scores: Tensor = aten._softmax_backward_data.default(given @ v.mT, weights, -1, wide)
    of_bias = of_scores.sum_to_size(bias.shape) if for_bias else bias.new_empty(0)
    if filled is not None:
        of_scores = of_scores.masked_fill(filled, 0.0)
    of_key, of_value = (of_scores.mT @ q * scale, weights.mT @ given)
    if times > 1:
        of_key, of_value = (each.unflatten(1, (-1, times)).sum(2) for each in (of_key, of_value))
    heads_inside = [(of_scores @ k * scale, query), (of_key, key), (of_value, value)]
    found = [side_by_side(each.to(like.dtype)) for each, like in heads_inside]
    return found[0], found[1], found[2], of_bias.to(bias.dtype)


def side_by_side(heads: Tensor) -> Tensor:
    """[batch, heads, length, width] as it lies where the heads of one place lie side by side, as the kernel has it."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, filled, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bias, filled, *output)


def gradients(ctx: Any, gradient: Tensor, _of_sums: Any) -> tuple[Any, ...]:
    query, key, value, bias, filled, result, sums = ctx.saved_tensors
    for_bias = bool(ctx.needs_input_grad[3])
    found = torch.ops.ferrite.masked_attention_backward.default(
        gradient, query, key, value, bias, filled, result, sums, ctx.scale, for_bias
    )
    return (*found[:3], found[3] if for_bias else None, None, None)


differentiate("masked_attention", gradients, keep)
MASKED_ATTENTION = torch.ops.ferrite.masked_attention.default
