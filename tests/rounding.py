"""Numbers rounded another way: what eager is off by there tells luck from error."""

from __future__ import annotations

import torch

# How often eager is run on other roundings, where its error at the inputs themselves is too small to judge by.
DRAWS = 4


def is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def nudged(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each number rounded another way, in place. Labels, counts and masks are exact: nobody would."""
    if not is_float(tensor) or tensor.layout is not torch.strided:
        return tensor
    whole = tensor == (tensor.real if tensor.is_complex() else tensor).round()
    signs = torch.randint(2, tensor.shape, generator=generator).to(tensor.device)
    signs = torch.where(whole, 0, 2 * signs - 1)
    real = tensor.abs().dtype
    return tensor.mul_(1 + torch.finfo(real).eps * signs.to(real))
