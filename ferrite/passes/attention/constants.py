"""What is known of the numbers in a graph: those that are one number, and those that are one of a few."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.graph import fake_value
from ferrite.rewrite.arguments import arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

# Constructors of one number, spelled as torch and as ATen, and which argument is the number.
FILLED = {
    torch.full: 1,
    aten.full.default: 1,
    torch.tensor: 0,
    aten.scalar_tensor.default: 0,
    aten.full_like.default: 1,
}
FILLED |= {torch.full_like: 1}
ZEROS = {torch.zeros, torch.zeros_like, aten.zeros.default, aten.zeros_like.default, "new_zeros"}
ONES = {torch.ones, torch.ones_like, aten.ones.default, aten.ones_like.default, "new_ones"}
# Calls whose elements are elements of their first argument.
MOVES = {
    *(aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.clone.default),
    *(aten.contiguous.default, aten.alias.default, aten.detach.default, aten._unsafe_view.default),
    *(aten.broadcast_to.default, aten.repeat.default, aten.lift_fresh_copy.default, operator.getitem),
}
CASTS = {
    *(aten.to.dtype, aten.to.device, aten.to.prim_Device, aten.to.other, aten.to.dtype_layout, aten._to_copy.default),
    *(prims.convert_element_type.default, aten.type_as.default, "type", "to"),
}
WHERES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}


def number_of(item: Any) -> float | None:
    """The number that an argument is, or the one that a tensor without dimensions was made of."""
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return float(item)
    if not isinstance(item, Node) or not isinstance(fake_value(item), torch.Tensor) or fake_value(item).dim():
        return None
    return only_number(item)


def only_number(node: Node) -> float | None:
    """The number that every element of a tensor is, as its type holds it."""
    found: Any = None
    if node.target in FILLED:
        place = FILLED[node.target]
        found = node.args[place] if len(node.args) > place else node.kwargs.get("fill_value", node.kwargs.get("data"))
    elif node.target in ZEROS or node.target in ONES:
        found = float(node.target in ONES)
    elif node.target in MOVES | CASTS and node.args and isinstance(node.args[0], Node):
        found = only_number(node.args[0]) if isinstance(fake_value(node.args[0]), torch.Tensor) else None
    if not isinstance(found, (int, float)):
        return None
    dtype = fake_value(node).dtype
    return rounded(found, dtype) if dtype.is_floating_point else None


def values_of(item: Any, steps: int = 8) -> frozenset[float] | None:
    """The numbers that the elements of a tensor can be, looking back so many steps; None where nobody knows."""
    if isinstance(item, (int, float)):
        return frozenset({float(item)})
    value = fake_value(item) if isinstance(item, Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not steps:
        return None
    number = only_number(item)
    if number is not None:
        return frozenset({number})
    given = arguments_of(item)
    if item.target in WHERES:
        return both(values_of(given["self"], steps - 1), values_of(given["other"], steps - 1))
    if item.target in FILLS:
        return both(values_of(given["self"], steps - 1), values_of(given["value"], steps - 1))
    if item.target in MOVES | CASTS and item.args:
        found = values_of(item.args[0], steps - 1)
        return None if found is None else frozenset(rounded(number, value.dtype) for number in found)
    return None


def both(one: frozenset[float] | None, other: frozenset[float] | None) -> frozenset[float] | None:
    return None if one is None or other is None else one | other


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a type holds it."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype).item())
