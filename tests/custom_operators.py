"""Operators of a user's own that write into their arguments."""

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
