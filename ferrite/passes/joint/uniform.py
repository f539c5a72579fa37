"""Tensors of which every element is one number that is known while compiling.

    a = full([4, 3], 2.0); b = expand(a * 3, [5, 4, 3])        every element of b is 6.0

The number is found on stand-ins with a single element, by the operators themselves. Only operators count whose result
is the exact one, rounded once: they give the same number on every device and for any number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import on_real_tensors
from ferrite.graph import HALVES, fake_value, same_number
from ferrite.passes.shared.const_scatter import fits
from ferrite.passes.shared.constants import MAX_CALLS_BEHIND
from ferrite.rewrite import Site, arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
Number = bool | int | float
DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)

# What each of them fills its result with.
LIKE: Mapping[Any, Callable[[Mapping[str, Any]], Any]] = {
    aten.full_like.default: lambda given: given["fill_value"],
    aten.zeros_like.default: lambda given: 0,
    aten.ones_like.default: lambda given: 1,
    aten.new_full.default: lambda given: given["fill_value"],
    aten.new_zeros.default: lambda given: 0,
    aten.new_ones.default: lambda given: 1,
}
CONSTRUCTORS: Mapping[Any, Callable[[Mapping[str, Any]], Any]] = {
    aten.full.default: lambda given: given["fill_value"],
    aten.zeros.default: lambda given: 0,
    aten.ones.default: lambda given: 1,
    aten.scalar_tensor.default: lambda given: given["s"],
    **LIKE,
}
RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
)
VIEWS = (*RESHAPES, aten.expand.default, aten.transpose.int, aten.t.default)
COPIES = (
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
    prims.device_put.default,
)
EXACT = (
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
    *(aten.neg.default, aten.abs.default, aten.sign.default, aten.relu.default),
    *(aten.floor.default, aten.ceil.default, aten.trunc.default),
    *(aten.maximum.default, aten.minimum.default, aten.where.self, aten.masked_fill.Scalar, aten.fill.Scalar),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.logical_not.default),
    *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default),
)


class Uniform:
    """A search backwards from values; `walked` are the calls it went through."""

    def __init__(self) -> None:
        self.constant_values: dict[torch.fx.Node, torch.Tensor | None] = {}

    @property
    def walked(self) -> list[torch.fx.Node]:
        return [node for node, found in self.constant_values.items() if found is not None]

    def number(self, item: Any) -> Number | None:
        """The number that a value, or every element of it, is; None where that is not known."""
        if isinstance(item, (bool, int, float)):
            return item
        found = self.of(item) if isinstance(item, torch.fx.Node) else None
        return number_in(found) if found is not None else None

    def of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """A stand-in with one element, of the rank and dtype of the node's value."""
        if node not in self.constant_values:
            self.constant_values[node] = None
            if len(self.constant_values) <= MAX_CALLS_BEHIND:
                self.constant_values[node] = self.computed(node)
        return self.constant_values[node]

    def computed(self, node: torch.fx.Node) -> torch.Tensor | None:
        value = fake_value(node)
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided or value.dtype not in DTYPES or node.kwargs.get("pin_memory"):
            return None
        if node.target in CONSTRUCTORS:
            return constant(CONSTRUCTORS[node.target](arguments_of(node)), value)
        if node.target not in VIEWS and node.target not in COPIES and node.target not in EXACT:
            return None
        stand_ins = {operand: self.of(operand) for operand in node.all_input_nodes if is_tensor(operand)}
        if not stand_ins or any(found is None for found in stand_ins.values()):
            return None
        if node.target in EXACT:
            return calculated(node, stand_ins, value)
        (source,) = stand_ins.values()
        assert source is not None
        if not fits(number_in(source), value.dtype):
            return None
        with on_real_tensors():
            return source.to(value.dtype).reshape([1] * value.ndim)


def number_in(stand_in: torch.Tensor) -> Number:
    with on_real_tensors():
        return stand_in.item()


def is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)


def constant(number: Any, look: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(number, (bool, int, float)) or not fits(number, look.dtype):
        return None
    with on_real_tensors():
        return torch.full([1] * look.ndim, number, dtype=look.dtype)


def calculated(
    node: torch.fx.Node, stand_ins: Mapping[torch.fx.Node, torch.Tensor | None], look: torch.Tensor
) -> torch.Tensor | None:
    given = arguments_of(node)
    if given.get("alpha", 1) != 1 or any(operand not in stand_ins for operand in node.all_input_nodes):
        return None
    # Devices differ in how they round a number that half precision does not hold before they calculate with it.
    if look.device.type != "cpu" and look.dtype in HALVES and any(isinstance(item, float) for item in given.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), stand_ins.__getitem__)
    assert callable(node.target)
    with on_real_tensors():
        result = node.target(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) and result.dtype == look.dtype else None


def sizes_as_arguments(site: Site, shape: Sequence[Any], walked: Sequence[torch.fx.Node]) -> list[Any] | None:
    """Sizes as the arguments of a call: each symbolic one needs a node that has it and is there before."""
    near = [operand for node in walked for operand in node.all_input_nodes]
    inputs = site.node.graph.find_nodes(op="placeholder")
    numbers = [node for node in (*inputs, *near) if isinstance(fake_value(node), torch.SymInt)]
    found: list[Any] = []
    for size in shape:
        if isinstance(size, int):
            found.append(size)
            continue
        node = next((each for each in numbers if same_number(fake_value(each), size)), None)
        if node is None:
            return None
        found.append(node)
    return found
