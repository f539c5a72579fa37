"""Attention as it is found in a graph, step by step on the way back from the last product.

    softmax(scores) @ value        scores: what the steps make of query @ key, from the inside out

A step is what one call does to the scores, or to the weights that the softmax made of them; `steps` has the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Node = torch.fx.Node
Arguments = dict[str, Any]


class Refused(Exception):
    """Why a call is no attention, or not one to rewrite."""

    @property
    def reason(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Scale:
    """Multiplied by a number."""

    factor: float


@dataclass(frozen=True)
class TensorScale:
    """Multiplied, or divided, by a tensor."""

    tensor: Node
    operator: Any = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class Add:
    """A mask is added, or taken away."""

    mask: Node
    negated: bool = False


@dataclass(frozen=True)
class Fill:
    """Overwritten with a number where a condition has the value `when`."""

    condition: Node
    value: float
    when: bool


@dataclass(frozen=True)
class Dropout:
    probability: float


@dataclass(frozen=True)
class Nothing:
    """Another type, another shape, a copy: the same numbers, or nearly."""


Change = Scale | TensorScale | Add | Fill | Dropout | Nothing


@dataclass(frozen=True)
class Step:
    """One call on the way, what it goes on from and what it does. A call may be readable in more than one way."""

    inner: Node
    change: Change


@dataclass(frozen=True)
class Product:
    """result[..., i, j] = sum over d of left[..., i, d] * right[..., d, j], with each operand's dimensions reordered
    first and the result's afterwards."""

    node: Node
    left: Node
    right: Node
    left_order: tuple[int, ...]
    right_order: tuple[int, ...]
    result_order: tuple[int, ...]
    steps: tuple[Change, ...] = ()  # what the same call does behind the product, from the inside out


@dataclass(frozen=True)
class Softmax:
    """`safe`: rows without any weight become zeros, where a plain softmax makes them nan."""

    scores: Node
    nodes: tuple[Node, ...]
    safe: bool = False


@dataclass
class Attention:
    """All that was found. `scores` has the changes from the inside out, each with the node that made it."""

    root: Node
    scores_product: Product
    scores: list[tuple[Node, Change]]
    softmax: Softmax
    weights_product: Product
    dropout: float = 0.0
    inside: list[Node] = field(default_factory=list)  # nodes that the rewrite makes unnecessary
