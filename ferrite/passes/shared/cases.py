"""Inputs for the examples and the near misses of rules, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
MakeInputs = Callable[[], list[Any]]


def uniform(
    *shapes: tuple[int, ...], low: float = 0, high: float = 1, dtype: torch.dtype = torch.float32, trained: bool = False
) -> MakeInputs:
    """A tensor for each shape, of numbers between two. `trained`: they require gradients."""
    return lambda: [(torch.rand(s) * (high - low) + low).to(dtype).requires_grad_(trained) for s in shapes]


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = False) -> MakeInputs:
    """A tensor for each shape, of numbers around zero. `trained`: they require gradients."""
    return lambda: [torch.randn(shape).to(dtype).requires_grad_(trained) for shape in shapes]


def trainable(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> MakeInputs:
    """A tensor for each shape, of small numbers, as weights are; they require gradients."""
    return uniform(*shapes, low=-0.5, high=0.5, dtype=dtype, trained=True)


def floats(*shape: int) -> MakeInputs:
    """One tensor of numbers around zero that requires gradients."""
    return normal(shape, trained=True)


def whole_numbers(*shapes: tuple[int, ...], last: bool = False, dtype: torch.dtype = torch.float32) -> MakeInputs:
    """Small whole numbers, of which sums are exact in any order. `last`: of images, the channels lie side by side."""

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(memory_format=torch.channels_last) if last and tensor.ndim == 4 else tensor

    return lambda: [lay(torch.randint(-4, 5, shape).to(dtype)) for shape in shapes]


def one(*shape: int) -> MakeInputs:
    """One tensor of numbers between zero and one: `one(2, 3)` makes [torch.rand(2, 3)]."""
    return uniform(shape)


def full(shape: list[Any], value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor of one number, as graphs of ATen spell it."""
    return aten.full.default(shape, value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


def on_meta(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    """On the device that stands in for an accelerator where there is none: rules look, they do not run."""
    return aten._to_copy.default(tensor, device=torch.device("meta"), dtype=dtype)


def on_accelerator(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that are moved there first."""
    return lambda *tensors: function(*map(on_meta, tensors))
