"""A program for `compute-sanitizer`: kernels of every form, on sizes that divide by nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

GPU = "cuda"
BF16 = torch.bfloat16


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype)


def places(count: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, (count,), device=GPU)


def sample() -> dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]]:
    images = made(5, 66, 7, 9).contiguous(memory_format=torch.channels_last)
    return {
        "chain": (lambda x: F.silu(x) * x.tanh() + 1, [made(37, 1001)]),
        "rows": (lambda x: x.softmax(-1), [made(33, 1003)]),
        "long rows": (lambda x: x.softmax(-1), [made(5, 70001, dtype=BF16)]),
        "columns": (lambda x: x.sum(0), [made(1000, 77)]),
        "all of a tensor": (lambda x: (x.sum(), x.var()), [made(100003)]),
        "transposed": (lambda x: (x.t() + 1).contiguous(), [made(129, 67)]),
        "concatenated": (lambda x, y: torch.cat([x.sin(), y.cos()], 1), [made(31, 17), made(31, 5)]),
        "gathered": (lambda x, i: x[i] * 2, [made(50, 33), places(71, 50)]),
        "scattered": (lambda x, i, v: x.index_add(0, i, v), [made(50, 33), places(71, 50), made(71, 33)]),
        "scanned": (lambda x: x.cumsum(-1), [made(3, 5001)]),
        "sorted": (lambda x: x.sort(-1), [made(9, 61)]),
        "positions": (lambda x: x.argmax(-1), [made(65, 513)]),
        "random": (lambda x: F.dropout(x.relu(), 0.3), [made(77, 130)]),
        "windows": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), [made(2, 3, 17, 19)]),
        "statistics": (lambda x: F.batch_norm(x, None, None, training=True), [images]),
        "products": (
            lambda x, w, b: F.gelu(F.linear(x, w, b)),
            [made(3, 112, dtype=BF16), made(80, 112, dtype=BF16), made(80, dtype=BF16)],
        ),
    }


def main() -> None:
    options = {"strict": True, "own_products": "always"}
    for function, given in sample().values():
        results = []
        for call in (torch.compile(function, backend="ferrite", options=options), function):
            torch.manual_seed(1)
            results.append(call(*given))
        torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
        torch.compiler.reset()

    def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (515,), weight, bias)

    given = [made(67, 515).requires_grad_(), made(515).requires_grad_(), made(515).requires_grad_()]
    gradient = made(67, 515)
    for dynamic in (False, True):
        compiled = torch.compile(normalised, backend="ferrite", dynamic=dynamic, options=options)
        found, wanted = (torch.autograd.grad(call(*given), given, gradient) for call in (compiled, normalised))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        torch.compiler.reset()
    torch.cuda.synchronize()
    print("computed as eager does")


if __name__ == "__main__":
    main()
