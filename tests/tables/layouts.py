"""The same call with its tensors laid out in other ways, or without elements, or of numbers at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

EDGES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-40, -1e-40, 3e38)
WHOLE_EDGES = (0, 1, -1, 2, 63, 64, -64)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The first dimension lies closest together in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def stepped(x: torch.Tensor) -> torch.Tensor:
    """Every second element of a longer row."""
    return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x


def offset(x: torch.Tensor) -> torch.Tensor:
    """One element into its storage, so that no vector is aligned."""
    memory = torch.cat([x.new_zeros(1), x.reshape(-1)])
    return memory[1:].view(x.shape)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first row again and again: a stride of zero."""
    return x[:1].expand(x.shape) if x.dim() and x.shape[0] > 1 else x


def backwards(x: torch.Tensor) -> torch.Tensor:
    """In the other order, as a flip leaves it."""
    if x.dtype is torch.complex32:  # torch 2.11 can flip neither this
        return backwards(x.to(torch.complex64)).to(x.dtype)
    if x.is_floating_point() and x.itemsize == 1:  # nor float8
        return backwards(x.view(torch.uint8)).view(x.dtype)
    return x.flip(0) if x.dim() else x


def empty(x: torch.Tensor) -> torch.Tensor:
    return x[:0] if x.dim() else x


def hollow(x: torch.Tensor) -> torch.Tensor:
    """No elements, but rows."""
    return x[..., :0] if x.dim() > 1 else x


def single(x: torch.Tensor) -> torch.Tensor:
    """A number without dimensions."""
    return x.reshape(-1)[0] if x.numel() else x


def edges(x: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Every pair of two arguments meets somewhere: one of them runs slowly through the table, the next one quickly."""
    numbers: Any = EDGES if x.is_floating_point() or x.is_complex() else WHOLE_EDGES
    if x.dtype is torch.bool or not x.numel():
        return x
    wide = torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64
    table = torch.tensor(numbers, dtype=wide, device=x.device)
    places = torch.arange(max(len(numbers) ** 2, x.numel()), device=x.device)
    places = places // len(numbers) if place % 2 else places
    return table[places % len(numbers)].to(x.dtype)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as given": lambda x: x,
    "transposed": transposed,
    "stepped": stepped,
    "offset": offset,
    "expanded": expanded,
    "backwards": backwards,
    "empty": empty,
    "hollow": hollow,
    "single": single,
    "edges": edges,
}


def laid_out(name: str, tensor: torch.Tensor, place: int) -> torch.Tensor:
    """The argument in this place, in another layout; what has none of its own (sparse, quantized, a subclass) is left
    alone."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    if tensor.is_quantized or tensor.is_meta:
        return tensor
    with torch.no_grad():
        new = edges(tensor.detach(), place) if name == "edges" else LAYOUTS[name](tensor.detach())
    return new.detach().requires_grad_(tensor.requires_grad)
