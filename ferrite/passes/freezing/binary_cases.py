"""On which programs arithmetic behind a layer is folded, and on which it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.rewrite import Case

aten = torch.ops.aten


def constant(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.5, step: float = 0.25) -> torch.Tensor:
    """A tensor that tracing takes for a constant: different numbers that are exact in any type."""
    numbers = [start + step * (index % 7) for index in range(math.prod(shape))]
    return torch.tensor(nested(numbers, shape), dtype=dtype)


def nested(numbers: list[float], shape: tuple[int, ...]) -> Any:
    """Numbers as lists of lists, so that one call makes the tensor."""
    if not shape:
        return numbers[0]
    step = len(numbers) // shape[0]
    return [nested(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def conv(x: Any, weight: Any, bias: Any = None, *, transposed: bool = False, groups: int = 1) -> Any:
    dims = weight.dim() - 2
    ones, zeros = [1] * dims, [0] * dims
    return aten.convolution.default(x, weight, bias, ones, zeros, ones, transposed, zeros, groups)


def norm(x: Any, *, gamma: Any = None, beta: Any = None, mean: Any = None, var: Any = None, eps: float = 1e-3) -> Any:
    channels = x.shape[1]
    mean, var = constant(channels) if mean is None else mean, constant(channels, start=1.5) if var is None else var
    return aten._native_batch_norm_legit_no_training.default(x, gamma, beta, mean, var, 0.1, eps)


IMAGE = (2, 4, 5, 5)


def of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) - 0.5).to(dtype) for shape in shapes]


def scaled(x: Any) -> Any:
    return conv(x, constant(6, 4, 3, 3), constant(6)) * constant(1, 6, 1, 1) + constant(6, 1, 1)


def through_a_reshape(x: Any) -> Any:
    flat = aten.mm.default(aten.view.default(x, [6, 4]), constant(4, 3))
    return aten.view.default(flat, [2, 3, 3]) * constant(3) + 2


def two_readers(x: Any) -> Any:
    y = conv(x, constant(6, 4, 1, 1))
    return y * 2, y.relu()


def read_beside_the_norm(x: Any) -> Any:
    y = conv(x, constant(6, 4, 1, 1))
    return norm(y)[0], y.relu()


def norm_of_a_sequence(x: Any) -> Any:
    """The channels of the norm are the second dimension, those of the layer the last."""
    flat = aten.mm.default(aten.view.default(x, [6, 4]), constant(4, 3))
    return norm(aten.view.default(flat, [2, 3, 3]))[0]


def one_weight(x: Any) -> Any:
    weight = constant(4, 4)
    return aten.mm.default(aten.mm.default(x, weight) * 2, weight)


def in_float32(x: Any) -> Any:
    y = conv(x, constant(6, 4, 1, 1, dtype=torch.bfloat16), constant(6, dtype=torch.bfloat16)).float()
    return (y * constant(6, 1, 1) + 0.25).bfloat16()


def norm_in_float32(x: Any) -> Any:
    y = norm(conv(x, constant(6, 4, 1, 1, dtype=torch.bfloat16)).float(), gamma=constant(6), beta=constant(6))[0]
    return y.bfloat16()


def kept_in_float32(x: Any) -> Any:
    return conv(x, constant(6, 4, 1, 1, dtype=torch.bfloat16)).float() * constant(6, 1, 1)


BINARY_EXAMPLES = (
    Case("a convolution, scaled and shifted by channel", scaled, of(IMAGE)),
    Case("no bias, a number", lambda x: 2 * conv(x, constant(6, 4, 1, 1)) - 3, of(IMAGE)),
    Case("a quotient", lambda x: conv(x, constant(6, 4, 1, 1), constant(6)) / constant(1, 6, 1, 1), of(IMAGE)),
    Case(
        "a scaled sum", lambda x: aten.add.Tensor(conv(x, constant(6, 4, 1, 1)), constant(6, 1, 1), alpha=2), of(IMAGE)
    ),
    Case(
        "a transposed convolution",
        lambda x: conv(x, constant(4, 4, 2, 2), transposed=True) * constant(4, 1, 1),
        of(IMAGE),
    ),
    Case(
        "a transposed convolution in groups",
        lambda x: conv(x, constant(4, 3, 2, 2), transposed=True, groups=2) * constant(6, 1, 1),
        of(IMAGE),
    ),
    Case("groups", lambda x: conv(x, constant(6, 2, 1, 1), groups=2) * constant(6, 1, 1), of(IMAGE)),
    Case("one dimension", lambda x: conv(x, constant(6, 4, 3)) * constant(6, 1), of((2, 4, 7))),
    Case("a product", lambda x: aten.mm.default(x, constant(4, 3)) * constant(3) + constant(1, 3), of((5, 4))),
    Case("a linear layer", lambda x: aten.addmm.default(constant(3), x, constant(4, 3)) / 4, of((5, 4))),
    Case("a linear layer through a reshape", through_a_reshape, of((2, 3, 4))),
    Case(
        "bfloat16",
        lambda x: conv(x, constant(6, 4, 1, 1, dtype=torch.bfloat16)) * constant(6, 1, 1, dtype=torch.bfloat16),
        of(IMAGE, dtype=torch.bfloat16),
    ),
    Case("bfloat16, the arithmetic in float32", in_float32, of(IMAGE, dtype=torch.bfloat16)),
)
BINARY_NEAR_MISSES = (
    Case(
        "the layer is subtracted",
        lambda x: aten.sub.Tensor(constant(6, 1, 1), conv(x, constant(6, 4, 1, 1))),
        of(IMAGE),
    ),
    Case("the layer divides", lambda x: constant(6, 1, 1) / conv(x, constant(6, 4, 1, 1)), of(IMAGE)),
    Case("the weight is an input", lambda x, w: conv(x, w) * 2, of(IMAGE, (6, 4, 1, 1))),
    Case("the bias is an input", lambda x, b: conv(x, constant(6, 4, 1, 1), b) * 2, of(IMAGE, (6,))),
    Case("the factor is an input", lambda x, c: conv(x, constant(6, 4, 1, 1)) * c, of(IMAGE, (6, 1, 1))),
    Case("it varies over the image", lambda x: conv(x, constant(5, 4, 1, 1)) * constant(5), of((2, 4, 5, 5))),
    Case("it varies over the batch", lambda x: aten.mm.default(x, constant(4, 3)) * constant(5, 3), of((5, 4))),
    Case("it makes the result larger", lambda x: aten.mm.default(x, constant(4, 1)) * constant(3), of((5, 4))),
    Case("it divides by zero", lambda x: aten.mm.default(x, constant(4, 3)) / constant(3, start=0.0), of((5, 4))),
    Case("it is not finite", lambda x: aten.mm.default(x, constant(4, 3)) * float("inf"), of((5, 4))),
    Case(
        "it overflows",
        lambda x: conv(x, constant(6, 4, 1, 1, dtype=torch.float16)) * 60000.0,
        of(IMAGE, dtype=torch.float16),
    ),
    Case("bfloat16, the result in float32", kept_in_float32, of(IMAGE, dtype=torch.bfloat16)),
    Case("the layer is read twice", two_readers, of(IMAGE)),
    Case("the weight is read twice", one_weight, of((5, 4))),
    Case("the bias has rows", lambda x: aten.addmm.default(constant(5, 3), x, constant(4, 3)) * 2, of((5, 4))),
    Case("a scaled product", lambda x: aten.addmm.default(constant(3), x, constant(4, 3), alpha=2) * 2, of((5, 4))),
    Case("the layer times itself", lambda x: (y := aten.mm.default(x, constant(4, 3))) * y, of((5, 4))),
    Case("nothing is added or scaled", lambda x: aten.mm.default(x, constant(4, 3)).relu(), of((5, 4))),
)

NORM_EXAMPLES = (
    Case("a convolution without bias", lambda x: norm(conv(x, constant(6, 4, 3, 3)))[0], of(IMAGE)),
    Case(
        "scale, shift and a bias",
        lambda x: norm(conv(x, constant(6, 4, 1, 1), constant(6)), gamma=constant(6), beta=constant(6))[0],
        of(IMAGE),
    ),
    Case("a transposed convolution", lambda x: norm(conv(x, constant(4, 4, 2, 2), transposed=True))[0], of(IMAGE)),
    Case(
        "a transposed convolution in groups",
        lambda x: norm(conv(x, constant(4, 3, 2, 2), transposed=True, groups=2))[0],
        of(IMAGE),
    ),
    Case("one dimension", lambda x: norm(conv(x, constant(6, 4, 3)))[0], of((2, 4, 7))),
    Case("three dimensions", lambda x: norm(conv(x, constant(3, 2, 2, 2, 2)))[0], of((2, 2, 3, 3, 3))),
    Case("a linear layer", lambda x: norm(aten.addmm.default(constant(3), x, constant(4, 3)))[0], of((5, 4))),
    Case(
        "bfloat16 with statistics in float32",
        lambda x: norm(conv(x, constant(6, 4, 1, 1, dtype=torch.bfloat16)))[0],
        of(IMAGE, dtype=torch.bfloat16),
    ),
    Case("bfloat16, the norm in float32", norm_in_float32, of(IMAGE, dtype=torch.bfloat16)),
)
NORM_NEAR_MISSES = (
    Case(
        "the norm is training",
        lambda x: aten._native_batch_norm_legit.no_stats(conv(x, constant(6, 4, 1, 1)), None, None, True, 0.1, 1e-3)[0],
        of(IMAGE),
    ),
    Case("the norm of something else", lambda x: norm(conv(x, constant(6, 4, 1, 1)).relu())[0], of(IMAGE)),
    Case("the statistics are inputs", lambda x, m: norm(conv(x, constant(6, 4, 1, 1)), mean=m)[0], of(IMAGE, (6,))),
    Case("the weight is an input", lambda x, w: norm(conv(x, w))[0], of(IMAGE, (6, 4, 1, 1))),
    Case(
        "float16 would overflow",
        lambda x: norm(
            conv(x, constant(6, 4, 1, 1, dtype=torch.float16)), var=constant(6, start=0.0, step=0.0), eps=1e-12
        )[0],
        of(IMAGE, dtype=torch.float16),
    ),
    Case("the layer is read twice", read_beside_the_norm, of(IMAGE)),
    Case("a sequence, as long as wide", norm_of_a_sequence, of((2, 3, 4))),
)
