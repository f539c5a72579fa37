"""Along rows and columns: reductions, softmax, norms, losses, running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.cases.case import Case, normal, several

SMALL, MIDDLE, LARGE, READ = (64, 256), (2048, 2048), (4096, 2048), (4096, 4096)


def reduction(name: str, dimension: int | None) -> Callable[[Any], Any]:
    reduce = getattr(torch, name)
    if dimension is None:
        return lambda x: reduce(x)
    return lambda x: reduce(x, dimension)


def mean_of_pixels(x: Any) -> Any:
    return x.mean((2, 3))


def squares_of_difference(x: Any, y: Any) -> Any:
    return (x - y).square().sum(-1)


def softmax(x: Any) -> Any:
    return x.softmax(-1)


def log_softmax(x: Any) -> Any:
    return x.log_softmax(-1)


def masked_softmax(x: Any, mask: Any) -> Any:
    return (x * 0.125 + mask).softmax(-1)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, weight.shape, weight, bias)


def rms_norm(x: Any, weight: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def residual_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total


def residual_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = x + residual
    return rms_norm(total, weight), total


def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any) -> Any:
    return F.batch_norm(x, mean, variance, weight, bias, True)


def batch_norm_eval(x: Any, weight: Any, bias: Any, mean: Any, variance: Any) -> Any:
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, False))


def group_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 8, weight, bias)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels)


def cumsum_rows(x: Any) -> Any:
    return x.cumsum(-1)


def cumsum_columns(x: Any) -> Any:
    return x.cumsum(0)


def with_parameters(count: int, grad: bool = False, inputs: int = 1) -> Callable[..., list[Any]]:
    """Some tensors of one shape, then parameters of the size of their last dimension."""
    return lambda *shape: [
        *(normal(*shape, grad=grad) for _ in range(inputs)),
        *(normal(shape[-1], grad=grad) for _ in range(count)),
    ]


def channels(statistics: bool, grad: bool = False) -> Callable[..., list[Any]]:
    """An image with scale and shift per channel, and running statistics."""

    def make(*shape: int) -> list[Any]:
        inputs = [normal(*shape, grad=grad), normal(shape[1], grad=grad), normal(shape[1], grad=grad)]
        return inputs + ([torch.zeros(shape[1]), torch.ones(shape[1])] if statistics else [])

    return make


def scores(batch: int, heads: int, length: int) -> list[Any]:
    hidden = torch.rand(batch, 1, 1, length) < 0.2
    return [normal(batch, heads, length, length), torch.zeros(hidden.shape).masked_fill(hidden, -1e9)]


def labelled(grad: bool) -> Callable[..., list[Any]]:
    return lambda rows, classes: [normal(rows, classes, grad=grad), torch.randint(0, classes, (rows,))]


def reductions() -> list[Case]:
    found = []
    for name in ("sum", "amax", "argmax", "var"):
        for where, dimension in (("rows", -1), ("columns", 0), ("all", None)):
            function = reduction(name, dimension)
            terms = 1000.0 if name == "sum" else 0.0  # a sum of so many is as far from zero before it is done
            found.append(Case(f"{name}-{where}", "reductions", function, several(1), SMALL, READ, terms=terms))
    return found


IMAGE, FULL_IMAGE, TRAINED_IMAGE = (2, 32, 16, 16), (32, 64, 64, 64), (16, 64, 64, 64)

ROWS: tuple[Case, ...] = (
    *reductions(),
    Case("sum-long-rows", "reductions", reduction("sum", -1), several(1), (4, 4096), (8, 2_097_152)),
    Case("sum-short-rows", "reductions", reduction("sum", -1), several(1), (1024, 8), (2_097_152, 8)),
    Case("mean-pixels", "reductions", mean_of_pixels, several(1), IMAGE, (64, 64, 64, 64)),
    Case("distances", "reductions", squares_of_difference, several(2), SMALL, LARGE),
    Case("softmax", "softmax", softmax, several(1), SMALL, LARGE),
    Case("softmax-long-rows", "softmax", softmax, several(1), (4, 4096), (64, 131_072)),
    Case("softmax-backward", "softmax", softmax, several(1, grad=True), SMALL, MIDDLE, backward=True),
    Case("log-softmax", "softmax", log_softmax, several(1), SMALL, LARGE),
    Case("softmax-masked", "softmax", masked_softmax, scores, (1, 4, 64), (4, 8, 512)),
    Case("layer-norm", "norms", layer_norm, with_parameters(2), SMALL, (8192, 1024)),
    Case("layer-norm-backward", "norms", layer_norm, with_parameters(2, True), SMALL, (4096, 1024), backward=True),
    Case("rms-norm", "norms", rms_norm, with_parameters(1), SMALL, (8192, 1024)),
    Case("rms-norm-backward", "norms", rms_norm, with_parameters(1, True), SMALL, (4096, 1024), backward=True),
    Case("residual-layer-norm", "norms", residual_layer_norm, with_parameters(2, inputs=2), SMALL, (4096, 1024)),
    Case("residual-rms-norm", "norms", residual_rms_norm, with_parameters(1, inputs=2), SMALL, (4096, 1024)),
    Case("batch-norm", "norms", batch_norm, channels(True), IMAGE, FULL_IMAGE),
    Case("batch-norm-backward", "norms", batch_norm, channels(True, True), IMAGE, TRAINED_IMAGE, backward=True),
    Case("batch-norm-eval-relu", "norms", batch_norm_eval, channels(True), IMAGE, FULL_IMAGE),
    Case("group-norm", "norms", group_norm, channels(False), IMAGE, FULL_IMAGE),
    Case("cross-entropy", "losses", cross_entropy, labelled(False), (32, 1000), (2048, 8192)),
    Case("cross-entropy-backward", "losses", cross_entropy, labelled(True), (32, 1000), (1024, 8192), backward=True),
    Case("cumsum-rows", "scans", cumsum_rows, several(1), SMALL, LARGE),
    Case("cumsum-columns", "scans", cumsum_columns, several(1), SMALL, LARGE),
)
