"""One case: a function, its inputs in a small and a large size, and the bytes that must move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

MEGABYTE = 1_000_000
LARGE = 64 * MEGABYTE  # of traffic: far beyond any cache


@dataclass(frozen=True)
class Case:
    """A kernel. `make(*size)` gives new positional arguments.

    With `backward`, gradients of the inputs that require them are computed too. `exact` says that a float64 run makes
    sense: without it values are compared by the bit. `random` cases draw numbers, which Inductor draws otherwise.
    `moved(inputs, outputs)` are bytes, where they are not those of all inputs and outputs. `terms`: how large a sum of
    numbers of both signs is on the way to its result, which may be far smaller: rounding is relative to that.
    """

    name: str
    group: str
    function: Callable[..., Any]
    make: Callable[..., list[Any]]
    small: tuple[Any, ...]
    large: tuple[Any, ...] | None = None
    backward: bool = False
    exact: bool = True
    random: bool = False
    moved: Callable[[list[Any], list[torch.Tensor]], int] | None = None
    terms: float = 0.0

    def sizes(self) -> dict[str, tuple[Any, ...]]:
        """`huge`: four times as large along the first dimension; what every call costs is little beside that."""
        if self.large is None:
            return {"small": self.small}
        return {"small": self.small, "large": self.large, "huge": (4 * self.large[0], *self.large[1:])}

    def traffic(self, inputs: list[Any], outputs: list[torch.Tensor]) -> int:
        """The fewest bytes between memory and processor: inputs read once, outputs written once.

        With gradients the inputs are read again, gradients of outputs read, and gradients of inputs written.
        """
        if self.moved is not None:
            return self.moved(inputs, outputs)
        read, written = size_of(tensors_of(inputs)), size_of(outputs)
        if not self.backward:
            return read + written
        differentiable = [tensor for tensor in outputs if tensor.is_floating_point()]
        return 2 * read + written + size_of(differentiable) + size_of(leaves_of(inputs))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaves_of(inputs: list[Any]) -> list[torch.Tensor]:
    """The inputs whose gradients are asked for."""
    return [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def several(count: int, **settings: Any) -> Callable[..., list[Any]]:
    """Makes so many inputs of one shape."""
    return lambda *shape: [normal(*shape, **settings) for _ in range(count)]
