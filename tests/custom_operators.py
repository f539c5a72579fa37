"""Operators of a user's own: some write into their arguments, one has other strides than it says."""

from __future__ import annotations

import torch


@torch.library.custom_op("writing::increment", mutates_args={"x"})
def increment(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("writing::swap", mutates_args={"x", "y"})
def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    held = x.clone()
    x.copy_(y)
    y.copy_(held)
    return x + y


@swap.register_fake
def _(x, y):
    return torch.empty_like(x)


@torch.library.custom_op("forecasting::by_columns", mutates_args=())
def by_columns(x: torch.Tensor) -> torch.Tensor:
    """Its result lies by columns, which its forecast does not say."""
    return x.t().clone(memory_format=torch.contiguous_format).t()


@by_columns.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
