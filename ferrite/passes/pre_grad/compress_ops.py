"""Operators for the compression of embeddings: each is one name for work that a kernel does in one go.

    lce(x, w, b)                [B, N, D] to [B, K, D]: w @ x + b[:, None], the same mix of rows for each sample
    lce_parts([x0, ...], w, b)  the same on cat([x0, ...], 1), which is never written
    dot_compress(x, y, w)       (x @ y.mT) @ w as x @ (y.mT @ w): the [N, M] products of rows are never written

The references below run where there is no such kernel, on the CPU always. Products accumulate in float32 at least, and
a bias is added before a result is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.passes.shared.library import define, differentiate

Tensor = torch.Tensor


def for_each_sample(weight: Tensor, x: Tensor) -> Tensor:
    return weight.expand(x.shape[0], *weight.shape)


# --- lce --------------------------------------------------------------------------------------------------------------


def look_of_lce(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], x.shape[2]))


@define("lce(Tensor x, Tensor weight, Tensor? bias) -> Tensor", look_of_lce)
def lce(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(for_each_sample(weight, x), x)
    return torch.baddbmm(bias.unsqueeze(-1), for_each_sample(weight, x), x)


def keep_lce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def lce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias = ctx.needs_input_grad
    return (
        torch.bmm(for_each_sample(weight.t(), grad), grad) if for_x else None,
        torch.einsum("bkd,bnd->kn", grad, x) if for_weight else None,
        grad.sum((0, 2)) if for_bias else None,
    )


differentiate("lce", lce_backward, keep_lce)


# --- lce on parts -----------------------------------------------------------------------------------------------------


def blocks_of(weight: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return list(weight.split([part.shape[1] for part in parts], 1))


def look_of_lce_parts(parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    return look_of_lce(parts[0], weight, bias)


@define("lce_parts(Tensor[] parts, Tensor weight, Tensor? bias) -> Tensor", look_of_lce_parts)
def lce_parts(parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.element_size() < 4 and len(parts) > 1:
        parts = [torch.cat(list(parts), 1)]  # a sum of parts would be rounded after each
    (first, *others), (block, *blocks) = parts, blocks_of(weight, parts)
    total: Tensor = lce(first, block, bias)
    for part, own in zip(others, blocks, strict=True):
        total.baddbmm_(for_each_sample(own, part), part)
    return total


def keep_lce_parts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, weight, bias = inputs
    ctx.save_for_backward(*parts, weight)
    ctx.has_bias = bias is not None


def lce_parts_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, weight = ctx.saved_tensors
    blocks = blocks_of(weight, parts)
    return (
        [torch.bmm(for_each_sample(block.t(), grad), grad) for block in blocks],
        torch.cat([torch.einsum("bkd,bnd->kn", grad, part) for part in parts], 1),
        grad.sum((0, 2)) if ctx.has_bias else None,
    )


differentiate("lce_parts", lce_parts_backward, keep_lce_parts)


# --- dot compress -----------------------------------------------------------------------------------------------------


def look_of_dot_compress(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[-1]))


@define("dot_compress(Tensor x, Tensor y, Tensor weight) -> Tensor", look_of_dot_compress)
def dot_compress(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """`weight` is [M, K], or one for each sample."""
    return torch.bmm(x, compressed(y, weight))


def compressed(y: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(y.mT, weight if weight.dim() == 3 else for_each_sample(weight, y))


def keep_dot_compress(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def dot_compress_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight = ctx.saved_tensors
    for_x, for_y, for_weight = ctx.needs_input_grad
    inner = torch.bmm(x.mT, grad)  # the gradient of y.mT @ weight
    each = weight if weight.dim() == 3 else for_each_sample(weight, y)
    own = (torch.bmm(y, inner) if weight.dim() == 3 else torch.einsum("bmd,bdk->mk", y, inner)) if for_weight else None
    return (
        torch.bmm(grad, compressed(y, weight).mT) if for_x else None,
        torch.bmm(each, inner.mT) if for_y else None,
        own,
    )


differentiate("dot_compress", dot_compress_backward, keep_dot_compress)
