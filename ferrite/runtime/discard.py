"""Let go of the memory of a tensor that its owners still hold, and say so to whoever uses it.

The object stays the same one, so that whoever was given it needs no other: it gets a class that answers questions about
shape and type, and raises on everything else.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import UserError

# What can still be asked.
ANSWERED = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "ndim", "is_cpu", "is_cuda")
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
}


class Discarded(torch.Tensor):
    """A buffer without contents."""

    about: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERED:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise without_contents(next(iter(discarded_in((args, kwargs))), None))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Discarded({self.about})"


class DiscardedParameter(Discarded, torch.nn.Parameter):
    """A parameter without contents."""


def discarded_in(value: Any) -> list[Discarded]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in discarded_in(item)]
    return [value] if isinstance(value, Discarded) else []


def without_contents(tensor: Discarded | None) -> UserError:
    """What whoever uses a discarded tensor is told."""
    about = tensor.about if tensor is not None else "a tensor"
    return UserError(
        f"{about} has no contents: it was discarded when the model was frozen",
        {
            "only": "the frozen model, with inputs like those it was compiled for, runs without it",
            "to change that": "load the model anew, or freeze it without the option freeze_discard_parameters",
        },
    )


def discard(tensor: torch.Tensor, about: str) -> None:
    """Free the memory of a tensor, unless others share it. `about` names it: "parameter 'weight' of module 'net.0'"."""
    hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    hollow.untyped_storage().resize_(0)
    tensor.data = hollow
    tensor.__class__ = DiscardedParameter if isinstance(tensor, torch.nn.Parameter) else Discarded
    tensor.about = about  # type: ignore[attr-defined]
