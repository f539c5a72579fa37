"""Saved tensors that hooks of the user's may hold.

AOTAutograd donates to the backward graph what the forward graph saves and returns to nobody: it is used once, and may
be written. But a hook around the call sees every tensor that is saved, and may keep it:

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = compiled(x)

Once a function has been called inside of hooks, its backward is given copies. (Nobody can tell what hooks have kept: a
tensor, its memory, a view of it in another library.) Each is made when what it is a copy of may go, so that they take
no room together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.capture.torch_api import BoxedCallable


class SavedTensors:
    """What is known of the tensors that one forward graph saves for its backward graph."""

    def __init__(self) -> None:
        self.may_be_held = False

    def saving(self, forward: BoxedCallable) -> BoxedCallable:
        """A forward that notices hooks."""

        def call(args: list[Any]) -> Any:
            if torch_api.has_saved_tensor_hooks():
                self.may_be_held = True
            return forward(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def using(self, backward: BoxedCallable, donated: Iterable[int]) -> BoxedCallable:
        """A backward that is given tensors of its own."""
        positions = sorted(donated)
        if not positions:
            return backward

        def call(args: list[Any]) -> Any:
            if self.may_be_held:
                for position in positions:
                    args[position] = copy_of(args[position])
            return backward(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same strides, which `clone` does not always keep."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)
