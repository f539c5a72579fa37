"""Element by element: chains of arithmetic, activations, conversions, dropout, optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.cases.case import Case, normal, several, size_of, tensors_of

SMALL, MIDDLE, LARGE = (64, 256), (2048, 2048), (4096, 2048)


def add_relu(x: Any, y: Any) -> Any:
    return torch.relu(x + y)


def short_chain(x: Any, y: Any) -> Any:
    return (x + y) * x - 0.5 * y


def long_chain(x: Any, y: Any) -> Any:
    for i in range(12):
        x = (x * 0.5 + y) / (1.0 + 0.1 * i)
        y = torch.maximum(x - y, y * 0.25)
    return x + y


def exponentials(x: Any) -> Any:
    return torch.exp(-x * x) / (1 + torch.exp(-x))


def tanh_chain(x: Any, y: Any) -> Any:
    return torch.tanh(x) * y + torch.tanh(x + y)


def gelu(x: Any) -> Any:
    return F.gelu(x)


def gelu_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def silu_times(x: Any, y: Any) -> Any:
    return F.silu(x) * y


def waves(x: Any) -> Any:
    return torch.sin(x) * torch.cos(x * 0.5)


def logarithms(x: Any) -> Any:
    return torch.log1p(x.abs()) * torch.sqrt(x.abs() + 1)


def choice(x: Any, y: Any, z: Any) -> Any:
    return torch.where(x > y, x.clamp(-1, 1), z)


def outer(x: Any, y: Any) -> Any:
    return x[:, None] * y[None, :] + 1


def integers(x: Any) -> Any:
    return ((x >> 2) ^ (x * 5)) & 1023


def dropout(x: Any) -> Any:
    return F.dropout(x, 0.1, True) * 2


def to_bfloat16(x: Any) -> Any:
    return x.to(torch.bfloat16)


def to_float32(x: Any) -> Any:
    return x.to(torch.float32)


def half_chain(x: Any, y: Any) -> Any:
    return torch.tanh(x * y + x) * F.silu(y)


def pixels(image: Any, mean: Any, deviation: Any) -> Any:
    return (image / 255 - mean) / deviation


def rope(x: Any, cosine: Any, sine: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def adam(parameters: Any, gradients: Any, means: Any, squares: Any) -> None:
    """The step of torch.optim.Adam over lists of tensors, in place."""
    torch._foreach_lerp_(means, gradients, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, means, roots, -0.001)


def row_and_bias(rows: int, columns: int) -> list[Any]:
    return [normal(rows, columns), normal(columns)]


def two_vectors(rows: int, columns: int) -> list[Any]:
    return [normal(rows), normal(columns)]


def image_bytes(batch: int, size: int) -> list[Any]:
    image = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
    return [image, torch.rand(3, 1, 1), torch.rand(3, 1, 1) + 0.5]


def heads_and_angles(batch: int, heads: int, length: int, width: int) -> list[Any]:
    angles = torch.outer(torch.arange(length), torch.rand(width // 2)).repeat(1, 2)
    return [normal(batch, heads, length, width), angles.cos(), angles.sin()]


def optimizer_state(count: int, rows: int, columns: int) -> list[Any]:
    lists = [[normal(rows, columns) for _ in range(count)] for _ in range(3)]
    return [*lists, [torch.rand(rows, columns) for _ in range(count)]]


def many_states(count: int, least: int, doublings: int) -> list[Any]:
    """Vectors of many lengths, as biases and norms of a model have them."""
    sizes = [least << place % (doublings + 1) for place in range(count)]
    lists = [[normal(size) for size in sizes] for _ in range(3)]
    return [*lists, [torch.rand(size) for size in sizes]]


def adam_traffic(inputs: list[Any], outputs: list[torch.Tensor]) -> int:
    """Four lists are read, three written."""
    return size_of(tensors_of(inputs)) * 7 // 4


def pointwise(name: str, function: Any, inputs: int, **settings: Any) -> Case:
    return Case(name, "pointwise", function, several(inputs), SMALL, LARGE if inputs < 3 else MIDDLE, **settings)


HALF = {"dtype": torch.bfloat16}

POINTWISE: tuple[Case, ...] = (
    pointwise("add-relu", add_relu, 2),
    pointwise("chain-short", short_chain, 2),
    pointwise("chain-long", long_chain, 2),
    pointwise("chain-exp", exponentials, 1),
    pointwise("chain-tanh", tanh_chain, 2),
    pointwise("gelu", gelu, 1),
    pointwise("gelu-tanh", gelu_tanh, 1),
    Case("bias-gelu", "pointwise", bias_gelu, row_and_bias, SMALL, LARGE),
    pointwise("silu-times", silu_times, 2),
    pointwise("sin-cos", waves, 1),
    pointwise("log-sqrt", logarithms, 1),
    pointwise("where-clamp", choice, 3),
    Case("outer", "pointwise", outer, two_vectors, SMALL, (4096, 4096)),
    Case("integers", "pointwise", integers, lambda *s: [torch.randint(0, 10**6, s)], SMALL, MIDDLE),
    Case("gelu-backward", "pointwise", gelu, several(1, grad=True), SMALL, MIDDLE, backward=True),
    Case("silu-times-backward", "pointwise", silu_times, several(2, grad=True), SMALL, MIDDLE, backward=True),
    Case("dropout", "pointwise", dropout, several(1), SMALL, LARGE, exact=False, random=True),
    Case(
        "dropout-backward",
        "pointwise",
        dropout,
        several(1, grad=True),
        SMALL,
        MIDDLE,
        backward=True,
        exact=False,
        random=True,
    ),
    Case("rope", "pointwise", rope, heads_and_angles, (1, 4, 64, 64), (4, 16, 2048, 64)),
    Case("to-bf16", "conversions", to_bfloat16, several(1), SMALL, (4096, 3072), exact=False),
    Case("to-fp32", "conversions", to_float32, several(1, **HALF), SMALL, (4096, 3072), exact=False),
    Case("chain-bf16", "conversions", half_chain, several(2, **HALF), SMALL, (4096, 3072)),
    Case("chain-fp16", "conversions", half_chain, several(2, dtype=torch.float16), SMALL, (4096, 3072)),
    Case("pixels", "conversions", pixels, image_bytes, (1, 64), (24, 512)),
    Case("adam", "optimizer", adam, optimizer_state, (20, 64, 64), (12, 1024, 512), moved=adam_traffic),
    Case("adam-many", "optimizer", adam, many_states, (100, 64, 5), (120, 64, 11), moved=adam_traffic),
)
