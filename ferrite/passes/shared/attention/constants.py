"""What is known of the numbers in a graph: those that are one number, and those that are one of a few."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.graph import Storage, fake_value, storages_of
from ferrite.passes.shared.attention.found import Node, is_tensor, source_of
from ferrite.passes.shared.constants import FILLED, FILLS, NUMBER_NAMES, ONES, ZEROS
from ferrite.rewrite import arguments_of

aten, prims = torch.ops.aten, torch.ops.prims

# Calls whose elements are elements of their first argument.
MOVES = {
    *(aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.clone.default),
    *(aten.contiguous.default, aten.alias.default, aten.detach.default, aten._unsafe_view.default),
    *(aten.broadcast_to.default, aten.repeat.default, aten.lift_fresh_copy.default, operator.getitem),
}
CASTS = {
    *(aten.to.dtype, aten.to.device, aten.to.prim_Device, aten.to.other, aten.to.dtype_layout, aten._to_copy.default),
    *(prims.convert_element_type.default, aten.type_as.default),
}
WHERES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
MAX_STEPS = 8  # from a value back to the numbers it is made of: a limit on the time to compile
Values = frozenset[float] | None


class ConstantValues:
    """The numbers of a graph that writes into some memory: of what lies there nothing is known."""

    def __init__(self, written: frozenset[Storage]) -> None:
        self.written = written

    def number(self, item: Any) -> float | None:
        """The number that an argument is, or that every element of a tensor is, as its type holds it."""
        found = self.values(item)
        return next(iter(found)) if found is not None and len(found) == 1 else None

    def values(self, item: Any, steps: int = MAX_STEPS) -> Values:
        """The numbers that the elements of a tensor can be, looking back so many steps; None where nobody knows."""
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return frozenset({float(item)})
        if not is_tensor(item) or not fake_value(item).is_floating_point() or not steps:
            return None
        if not self.written.isdisjoint(storages_of(item)):
            return None
        found = self.values_of_call(item, steps - 1)
        return None if found is None else frozenset(rounded(number, fake_value(item).dtype) for number in found)

    def values_of_call(self, node: Node, steps: int) -> Values:
        given = arguments_of(node)
        if node.target in FILLED:
            place, names = FILLED[node.target], [name for name in NUMBER_NAMES if name in given]
            number = given[names[0]] if names else given.get(str(place))
            return self.values(number, steps) if isinstance(number, (int, float)) else None
        if node.target in ZEROS or node.target in ONES:
            return frozenset({float(node.target in ONES)})
        if node.target in WHERES:
            return both(self.values(given["self"], steps), self.values(given["other"], steps))
        if node.target in FILLS:
            return both(self.values(given["self"], steps), self.values(given["value"], steps))
        if node.target in MOVES | CASTS:
            return self.values(source_of(node), steps)
        return None


def both(one: Values, other: Values) -> Values:
    return None if one is None or other is None else one | other


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a type holds it."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype).item())
