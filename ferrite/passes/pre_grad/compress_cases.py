"""What the rules of `compress` fire on, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.passes.shared.cases import trainable
from ferrite.rewrite import Case

B, N, D, K = 2, 3, 4, 5
X, W, BIAS = (B, N, D), (K, N), (K,)


def between_transposes(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x.transpose(1, 2), w, b).transpose(1, 2).relu().sum(1)


def left_transposed(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x.permute(0, 2, 1), w, b).sum(1)


SIMPLE = (
    Case("a product", lambda x, w: torch.matmul(w, x), trainable(X, W)),
    Case("a product and a column", lambda x, w, b: b[:, None] + w @ x, trainable(X, W, BIAS)),
    Case("an einsum", lambda x, w: torch.einsum("bnd,kn->bkd", x, w).relu().sum(1), trainable(X, W)),
    Case("a layer between transposes", between_transposes, trainable(X, W, BIAS)),
    Case("a layer behind a transpose", left_transposed, trainable(X, W, BIAS)),
    Case("half precision", lambda x, w, b: w @ x + b.view(-1, 1), trainable(X, W, BIAS, dtype=torch.bfloat16)),
)
NOT_SIMPLE = (
    Case("a weight for each sample", lambda x, w: torch.matmul(w, x), trainable(X, (B, K, N))),
    Case("in double precision", lambda x, w: torch.matmul(w, x), trainable(X, W, dtype=torch.float64)),
    Case("a diagonal", lambda x, w: torch.einsum("bnn,kn->bkn", x, w), trainable((B, N, N), W)),
    Case("a weight too large", lambda x, w: torch.matmul(w, x), trainable((1, 1025, 1), (1, 1025))),
    Case("the output has its strides", lambda x, w: F.linear(x.mT, w).mT, trainable(X, W)),
)


def joined(*, then: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, w, *more: then(torch.cat([x, y], 1), w, *more)


def concat_is_read(x: Any, y: Any, w: Any) -> Any:
    whole = torch.cat([x, y], 1)
    return w @ whole, whole.relu()


PARTS = ((B, 1, D), (B, 2, D), W)
JOINED = (
    Case("a product with a concat", joined(then=lambda x, w: w @ x), trainable(*PARTS)),
    Case("with a bias", joined(then=lambda x, w, b: w @ x + b.unsqueeze(-1)), trainable(*PARTS, BIAS)),
    Case("a layer between transposes", joined(then=between_transposes), trainable(*PARTS, BIAS)),
    Case("a stack", lambda a, b, c, w: w @ torch.stack([a, b, c], 1), trainable((B, D), (B, D), (B, D), W)),
)
NOT_JOINED = (
    Case("no concat", lambda x, w: w @ x, trainable(X, W)),
    Case("a concat of samples", lambda x, y, w: w @ torch.cat([x, y]), trainable(X, X, W)),
    Case("the concat is read elsewhere", concat_is_read, trainable(*PARTS)),
)


def two_heads(x: Any, w: Any, v: Any, b: Any) -> Any:
    return (w @ x).relu(), (v @ x + b.unsqueeze(-1)).tanh()


def two_forms(x: Any, w: Any, v: Any, b: Any) -> Any:
    return (w @ x).relu(), F.linear(x.mT, v, b).mT.tanh().sum(1)


FIRST = (
    Case("two, one with a bias", two_heads, trainable(X, W, (2, N), (2,))),
    Case("two, written in two ways", two_forms, trainable(X, W, (2, N), (2,))),
    Case("returned as they are", lambda x, w, v: (w @ x, v @ x), trainable(X, W, (2, N))),
)
NOT_FIRST = (
    Case("one", lambda x, w: (w @ x).relu(), trainable(X, W)),
    Case("of two inputs", lambda x, y, w, v: ((w @ x).relu(), (v @ y).relu()), trainable(X, X, W, W)),
    Case(
        "of a compression",
        lambda x, w, v, u: (v @ (h := (w @ x).relu())).relu() + (u @ h).relu(),
        trainable(X, W, (2, K), (2, K)),
    ),
)


def dot(x: Any, y: Any, w: Any) -> Any:
    return torch.matmul(torch.matmul(x, y.transpose(1, 2)), w)


def dot_is_read(x: Any, y: Any, w: Any) -> Any:
    products = torch.matmul(x, y.transpose(1, 2))
    return torch.matmul(products, w), products.relu()


def attention(x: Any, y: Any, w: Any) -> Any:
    return torch.matmul(torch.matmul(x, y.transpose(1, 2)).softmax(-1), w)


DOT = (
    Case("two inputs", dot, trainable((B, 6, 2), (B, 5, 2), (5, 2))),
    Case("one input", lambda x, w: dot(x, x, w), trainable((B, 6, 2), (6, 2))),
    Case("a weight for each sample", lambda x, y, w: x.bmm(y.mT).bmm(w), trainable((B, 6, 2), (B, 5, 2), (B, 5, 2))),
)
NOT_DOT = (
    Case("as many operations", dot, trainable((B, 2, 2), (B, 2, 2), (2, 2))),
    Case("softmax between", attention, trainable((B, 6, 2), (B, 5, 2), (5, 2))),
    Case("the products are read", dot_is_read, trainable((B, 6, 2), (B, 5, 2), (5, 2))),
    Case("float16", dot, trainable((B, 6, 2), (B, 5, 2), (5, 2), dtype=torch.float16)),
)

# The sizes of all these cases are too small to pay.
AUTO = {"compress": ("auto",)}
NOT_BY_THE_MODEL = {
    "lce-simple": (Case("by the model", between_transposes, trainable(X, W, BIAS), AUTO),),
    "lce-parts": (Case("by the model", joined(then=lambda x, w: w @ x), trainable(*PARTS), AUTO),),
    "lce-matmul": (Case("by the model", joined(then=lambda x, w: w @ x), trainable(*PARTS), AUTO),),
    "dot-compress": (Case("by the model", dot, trainable((B, 6, 2), (B, 5, 2), (5, 2)), AUTO),),
}
