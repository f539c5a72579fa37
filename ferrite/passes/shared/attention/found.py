"""Attention as it is found in a graph, step by step on the way back from the last product.

    softmax(scores) @ value        scores: what the steps make of query @ key, from the inside out

A step is what one spelling does to the scores, or to the weights that the softmax made of them; `spellings` has the
tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.rewrite import in_order

Node = torch.fx.Node


# --- what a spelling stands for: numbers and tensors are as the call has them -----------------------------------------


@dataclass(frozen=True)
class Scale:
    """Multiplied by a number or a tensor, or divided."""

    by: Any
    divides: bool = False


@dataclass(frozen=True)
class Add:
    """A mask is added so many times."""

    mask: Any
    times: Any = 1


@dataclass(frozen=True)
class Fill:
    """Overwritten with a number where a condition has the value `when`."""

    condition: Any
    value: Any
    when: bool


@dataclass(frozen=True)
class Dropout:
    probability: Any
    train: Any


@dataclass(frozen=True)
class Nothing:
    """Another type, another shape, a copy: the same numbers, or nearly."""


@dataclass(frozen=True)
class Softmax:
    """Along some dimensions. `safe`: rows without any weight become zeros, where a plain softmax makes them nan."""

    dims: tuple[Any, ...]
    safe: bool = False


@dataclass(frozen=True)
class TensorFactor:
    """A product with a tensor on the right. `equation`: of einsum; `then`: what the same call does to the product."""

    right: Any
    equation: str | None = None
    then: tuple[Scale | Add, ...] = ()


Change = Scale | Add | Fill | Dropout | Nothing
Meaning = Change | Softmax | TensorFactor


@dataclass(frozen=True)
class FoundStep:
    """A spelling that was found: what it goes on from, what it does, and its calls, the last one first."""

    inner: Node
    meaning: Any
    nodes: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.nodes[0]


# --- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreProduct:
    """result[..., i, j] = sum over d of left[..., i, d] * right[..., d, j], with each operand's dimensions reordered
    first and the result's afterwards."""

    node: Node
    left: Node
    right: Node
    left_order: tuple[int, ...]
    right_order: tuple[int, ...]
    result_order: tuple[int, ...]
    then: tuple[Scale | Add, ...] = ()


@dataclass
class FoundAttention:
    """All that was found. `scores` has the changes from the inside out, each with the node that made it."""

    root: Node
    scores_product: ScoreProduct
    scores: list[tuple[Node, Change]]
    softmax: FoundStep
    weights_product: ScoreProduct
    dropout: float = 0.0
    inside: list[Node] = field(default_factory=list)  # nodes that the rewrite makes unnecessary


# --- what is asked of nodes -------------------------------------------------------------------------------------------


def is_tensor(item: Any) -> bool:
    return isinstance(item, Node) and isinstance(fake_value(item), torch.Tensor)


def source_of(node: Node) -> Node | None:
    """The tensor that a call is about: its first argument, however that is passed."""
    first = next(iter(in_order(node)), None)
    return first if isinstance(first, Node) and is_tensor(first) else None


def same_count(one: Node, other: Node) -> bool:
    """Whether two tensors provably have as many elements."""
    return torch_api.known_equal(fake_value(one).numel(), fake_value(other).numel())
