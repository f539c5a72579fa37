"""Constants of a graph: tensors that it reads from the module that owns it, and those that it fills with one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import attribute_of
from ferrite.rewrite import arguments_of

aten = torch.ops.aten

# Calls that make a tensor of one number, spelled as torch and as ATen: which positional argument is the number, and how
# it may be named.
FILLED: Mapping[Any, int] = {
    **dict.fromkeys((torch.full, torch.full_like, aten.full.default, aten.full_like.default), 1),
    **dict.fromkeys((torch.tensor, torch.scalar_tensor, aten.scalar_tensor.default), 0),
    "new_full": 2,
}
MAX_CALLS_BEHIND = 64  # calls between a value and its constructors: so the cost of asking stays small in any graph
NUMBER_NAMES = ("fill_value", "data", "s")
ZEROS = frozenset({torch.zeros, torch.zeros_like, aten.zeros.default, aten.zeros_like.default, "new_zeros"})
ONES = frozenset({torch.ones, torch.ones_like, aten.ones.default, aten.ones_like.default, "new_ones"})
# Calls that put one number where a mask says so.
FILLS = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})


def constant_of(item: Any) -> torch.Tensor | None:
    """The tensor behind a node that reads one, also through the copy that tracing puts behind `torch.tensor(...)`."""
    if not isinstance(item, torch.fx.Node):
        return None
    if item.target is aten.lift_fresh_copy.default:
        return constant_of(item.args[0])
    found = attribute_of(item) if item.op == "get_attr" else None
    return found if isinstance(found, torch.Tensor) and not torch_api.is_fake(found) else None


@dataclass(frozen=True)
class Filled:
    """A new tensor of one number: `torch.zeros(4, 6)` has the value 0 and the sizes [4, 6]."""

    value: Any
    sizes: Sequence[Any]
    pinned: bool


def filled(item: Any) -> Filled | None:
    """What a node fills a new tensor with, however that is spelled; None for any other node."""
    if not isinstance(item, torch.fx.Node) or item.target not in FILLING:
        return None
    given = arguments_of(item)
    value = given["fill_value"] if item.target is aten.full.default else FILLING[item.target]
    return Filled(value, given["size"], bool(given["pin_memory"]))


FILLING = {aten.full.default: None, aten.zeros.default: 0, aten.ones.default: 1}
