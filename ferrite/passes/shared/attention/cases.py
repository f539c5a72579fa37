"""Attention as people write it, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout

from ferrite.passes.shared.attention.bias import LOWEST
from ferrite.passes.shared.cases import MakeInputs
from ferrite.rewrite import Case

aten = torch.ops.aten
ALWAYS = {"attention": "always"}
REDRAWN = {"attention": "always", "rng": "counter"}


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[batch, length, heads, width], as a projection gives it, seen as [batch, heads, length, width]."""
    size = shape or (2, 5, 3, 4)
    return torch.randn(size).to(dtype).transpose(1, 2).requires_grad_()


def three(dtype: torch.dtype = torch.float32) -> list[Any]:
    return [heads(dtype=dtype) for _ in range(3)]


def three_and(mask: Callable[[], torch.Tensor]) -> MakeInputs:
    return lambda: [*three(), mask()]


def trained_mask() -> list[Any]:
    return [*three(), torch.randn(5, 5, requires_grad=True)]


def matrices() -> list[Any]:
    return [torch.randn(6, 5, 4, requires_grad=True) for _ in range(3)]


def padding() -> torch.Tensor:
    """The last keys of the second sequence are hidden."""
    return (tokens() == 0)[:, None, None]


def rows() -> torch.Tensor:
    """Nothing is left for one query."""
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[2] = hidden[0, 3:] = True
    return hidden


def more_scores() -> torch.Tensor:
    """A mask for each of two sequences."""
    return torch.randn(2, 1, 5, 5)


def tokens() -> torch.Tensor:
    """Which keys there are, as numbers; any but zero counts."""
    return torch.tensor([[1, 1, 1, 1, 1], [2, 1, -1, 0, 0]])


def mask_of(hidden: Any, value: float = LOWEST) -> Any:
    return torch.where(hidden, value, 0.0)


def weights(q: Any, k: Any, scale: float = 0.5) -> Any:
    return (q @ k.transpose(-2, -1) * scale).softmax(-1)


def plain(q: Any, k: Any, v: Any) -> Any:
    return (weights(q, k) @ v).transpose(1, 2).contiguous()


def behind(scores: Callable[..., Any]) -> Callable[..., Any]:
    """Attention by its scores; the result is returned as models return it."""
    return lambda q, k, v, *masks: (scores(q, k, *masks).softmax(-1) @ v).transpose(1, 2).reshape(q.shape[0], -1, 12)


def distilbert(q: Any, k: Any, tokens: Any) -> Any:
    mask = (tokens == 0).view(tokens.shape[0], 1, 1, tokens.shape[1])
    return (q * 0.5 @ k.transpose(2, 3)).masked_fill(mask, -math.inf)


def gpt2(q: Any, k: Any) -> Any:
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    scores = q @ k.transpose(-1, -2) / torch.full([], 2.0)
    return torch.where(causal, scores, torch.full([], LOWEST))


def bart(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Heads are flattened into the batch, and the mask is added in between in four dimensions."""
    flat = [x.reshape(6, 5, 4) for x in (q * 0.5, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(2, 3, 5, 5) + mask_of(mask)
    return torch.bmm(scores.view(6, 5, 5).softmax(-1), flat[2]).view(2, 3, 5, 4).transpose(1, 2).reshape(2, 5, 12)


def t5(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = q @ k.transpose(3, 2) + mask_of(mask, -0.5)
    return (torch.softmax(scores, -1).type_as(scores) @ v).transpose(1, 2).contiguous().view(q.shape[0], -1, 12)


def grouped(q: Any, k: Any, v: Any) -> Any:
    k, v = (x[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for x in (k, v))
    return plain(q, k, v)


def in_parts(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-2, -1) * 0.5
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True) @ v).transpose(1, 2).contiguous()


def in_half_precision(q: Any, k: Any, v: Any) -> Any:
    """The softmax is computed in single precision."""
    scores = q @ k.transpose(2, 3) * 0.5
    return (scores.softmax(-1, dtype=torch.float32).type_as(v) @ v).transpose(1, 2).contiguous()


def permuted_inside(q: Any, k: Any, v: Any) -> Any:
    """[batch, length, heads, width] comes in and goes out."""
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return ((q / 2 @ k).softmax(-1) @ v).permute(0, 2, 1, 3).contiguous()


def filled_like_the_scores(q: Any, k: Any, hidden: Any) -> Any:
    scores = q @ k.mT / 2
    return torch.where(hidden, torch.full_like(scores, -math.inf), scores)


def filled_by_the_scores(q: Any, k: Any) -> Any:
    scores = q @ k.mT
    return scores.masked_fill(scores > 0, -math.inf)


def two_uses(q: Any, k: Any, v: Any) -> Any:
    attended = weights(q, k)
    return (attended @ v).transpose(1, 2).contiguous(), attended


EXAMPLES = (
    Case("scaled scores", plain, three),
    Case("scaled queries and keys", behind(lambda q, k: q * 0.7 @ (k / 2).transpose(2, 3)), three),
    Case("a mask is added", behind(lambda q, k, m: q @ k.mT / 2 + mask_of(m)), three_and(padding)),
    Case("a mask hides whole rows", behind(lambda q, k, m: q @ k.mT / 2 + mask_of(m)), three_and(rows)),
    Case("a mask of minus infinity does", behind(lambda q, k, m: q @ k.mT + mask_of(m, -math.inf)), three_and(rows)),
    Case("scaled behind the mask", behind(lambda q, k, m: (q @ k.mT + mask_of(m)) * 0.5), three_and(padding)),
    Case("a mask is taken away", behind(lambda q, k, m: q @ k.mT - mask_of(m, 0.5)), three_and(padding)),
    Case(
        "filled with minus infinity, one row in full",
        behind(lambda q, k, m: (q @ k.mT).masked_fill(m, -math.inf)),
        three_and(rows),
    ),
    Case(
        "filled with the lowest number, one row in full",
        behind(lambda q, k, m: (q @ k.mT).masked_fill(m, LOWEST)),
        three_and(rows),
    ),
    Case("a mask of large numbers does", behind(lambda q, k, m: q @ k.mT + mask_of(m, -1e9)), three_and(rows)),
    Case("filled by a tensor like the scores", behind(filled_like_the_scores), three_and(rows)),
    Case("any number but zero is a token", behind(distilbert), three_and(tokens)),
    Case("causal", behind(gpt2), three),
    Case("filled, and a mask hides more", behind(lambda q, k, m: gpt2(q, k) + mask_of(m)), three_and(padding)),
    Case("a mask that nobody knows", behind(lambda q, k, m: q @ k.mT + m), three_and(lambda: mask_of(rows()))),
    Case("flattened heads", bart, three_and(padding)),
    Case("unscaled, with a bias for each head", t5, three_and(lambda: torch.rand(1, 3, 5, 5) > 0.5)),
    Case("groups of heads", grouped, lambda: [heads(2, 5, 6, 4), heads(2, 5, 2, 4), heads(2, 5, 2, 4)]),
    Case("half precision, cast up for the softmax", in_half_precision, lambda: three(torch.bfloat16)),
    Case("permuted inside", permuted_inside, lambda: [torch.randn(2, 5, 3, 4, requires_grad=True) for _ in range(3)]),
    Case("three dimensions", lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v), matrices),
    Case("a softmax in parts", in_parts, three),
    Case("a scale for each head", behind(lambda q, k, s: q @ k.mT * s.exp()), three_and(lambda: torch.randn(3, 1, 1))),
    Case("dropout that drops nothing", lambda q, k, v: (dropout(weights(q, k), 0.0) @ v).mT.contiguous(), three),
)

NEAR_MISSES = (
    Case("switched off", plain, three, {"attention": "off"}),
    Case("strict numerics", plain, three, {"numerics": "strict"}),
    Case("the weights are returned", two_uses, three),
    Case("the softmax is over the queries", lambda q, k, v: (q @ k.mT).softmax(-2) @ v, three),
    Case("the scale varies along the keys", behind(lambda q, k, s: q @ k.mT * s), three_and(lambda: torch.rand(5))),
    Case(
        "filled with a number that is not far", behind(lambda q, k, m: (q @ k.mT).masked_fill(m, -9.0)), three_and(rows)
    ),
    Case("something else in between", behind(lambda q, k: (q @ k.mT).tanh()), three),
    Case("a negative scale", behind(lambda q, k: q @ k.mT * -0.5), three),
    Case("a mask makes more of the scores", behind(lambda q, k, m: q[:1] @ k[:1].mT + m), three_and(more_scores)),
    Case("rounded to half precision", behind(lambda q, k: (q @ k.mT).half().type_as(q)), three),
    Case("the weights are transposed", lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, three),
    Case("the scores are transposed", lambda q, k, v: (q @ k.mT).mT.softmax(-1) @ v, three),
    Case("the scores fill themselves", behind(filled_by_the_scores), three),
    Case("the scores mask themselves", behind(lambda q, k: (s := q @ k.mT) + s), three),
    Case("values of another width", lambda q, k, v: weights(q, k) @ v[..., :2].contiguous(), three),
    Case("a mask of whole numbers", behind(lambda q, k, m: q @ k.mT + m), three_and(lambda: tokens()[:, None, None])),
)
# where gradients are to come, and strides are as matmul gives them
TRAINING_NEAR_MISSES = (
    Case("a mask that is trained", behind(lambda q, k, m: q @ k.mT + m), trained_mask),
    Case("the result has strides that can be seen", lambda q, k, v: weights(q, k) @ v, three),
)

DROPOUT_EXAMPLES = (
    # which weights are dropped does not matter where all are
    Case(
        "all are dropped",
        lambda q, k, v: (dropout(weights(q, k), 1.0) @ v).transpose(1, 2).contiguous(),
        three,
        REDRAWN,
    ),
)
DROPOUT_NEAR_MISSES = (
    Case("eager's random numbers are wanted", lambda q, k, v: dropout(weights(q, k), 1.0) @ v, three, ALWAYS),
    Case("nothing is dropped", lambda q, k, v: dropout(weights(q, k), 1.0, False) @ v, three, REDRAWN),
    Case("on a cpu it does not pay", lambda q, k, v: dropout(weights(q, k), 1.0) @ v, three, {"rng": "counter"}),
)
