"""Calls that write an operand in the program, and make a new tensor in the graph: it lies where the operand does.

x.relu_()        relu(x), for which eager would choose strides; those of x stay as they are
x[x > 0] = 2     index_put(x, ...), likewise
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.graph import fake_value, same_number, same_sizes, storages_in

aten = torch.ops.aten
ASSIGNED = frozenset({aten.index_put, aten.fill, aten.copy})  # what `x[places] = values` is
PARTS = frozenset({aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter})  # of a tensor, written in any way
AUGMENTED = {
    operator.iadd: aten.add,
    operator.isub: aten.sub,
    operator.imul: aten.mul,
    operator.itruediv: aten.div,
    operator.ifloordiv: aten.floor_divide,
    operator.imod: aten.remainder,
    operator.ipow: aten.pow,
    operator.iand: aten.bitwise_and,
    operator.ior: aten.bitwise_or,
    operator.ixor: aten.bitwise_xor,
}


def written_operand(node: torch.fx.Node) -> torch.fx.Node | None:
    """The operand that a call has written in the program; None for other calls."""
    source = source_of(node)
    if source is None or not node.args:
        return None
    call, operand = node, node.args[0]
    if node.target is aten._to_copy.default and isinstance(operand, torch.fx.Node) and source_of(operand) == source:
        call, operand = operand, operand.args[0] if operand.args else None  # what was computed in a wider type
    if not isinstance(operand, torch.fx.Node) or not writes_first_operand(call, source):
        return None
    before, after = fake_value(operand), fake_value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return None
    if not same_sizes(before.shape, after.shape) or storages_in(before) == storages_in(after):
        return None
    return operand


def source_of(node: torch.fx.Node) -> Any:
    """The call in the program, with its name there, that a call in the graph was made for."""
    stack = node.meta.get("source_fn_stack")
    return stack[-1] if stack else None


def is_seen_after_write(node: torch.fx.Node) -> bool:
    """Whether a view was made for a write: functionalization looks at what was written as its owners do. Those lie as
    they did before, whatever the strides of such a view are."""
    source = source_of(node)
    return source is not None and getattr(node.target, "is_view", False) and is_write(source[1])


def lies_as_before(node: torch.fx.Node) -> bool:
    """Whether a view that was made for a write is one of something that is known to lie as it did before the write.
    Without elements, what a view was written through is not: the way back through other sizes loses the strides."""
    is_empty = any(same_number(size, 0) for size in fake_value(node).shape)
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    operand = written_operand(node)
    if operand is None or (is_empty and getattr(operand.target, "is_view", False)):
        return False
    return same_sizes(fake_value(operand).stride(), fake_value(node).stride())


def owner_before_write(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a view that was made for a write shows, as it was before: the views that led to what was written are gone
    back through.

    squeeze(fill(unsqueeze(v)))     v, after v[None] = 0.5
    """
    after: list[torch.fx.Node] = []
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], torch.fx.Node):
        after.append(node)
        node = node.args[0]
    operand = written_operand(node)
    for view in reversed(after):
        if operand is None or not getattr(operand.target, "is_view", False):
            return None
        operand = operand.args[0] if isinstance(operand.args[0], torch.fx.Node) else None
        if operand is None or not same_sizes(fake_value(operand).shape, fake_value(view).shape):
            return None
    return operand


def is_write(function: Any) -> bool:
    """Whether a call in the program, by its name or function, writes to its first operand."""
    name = name_of(function)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or function is operator.setitem or function in AUGMENTED


def name_of(function: Any) -> str:
    """`mul_` of a method, and of a function of that name."""
    return function if isinstance(function, str) else getattr(function, "__name__", "").partition(".")[0]


def writes_first_operand(node: torch.fx.Node, source: Any) -> bool:
    packet, function = getattr(node.target, "overloadpacket", None), source[1]
    if packet is None:
        return False
    if packet in PARTS:
        return is_write(function)
    if function is operator.setitem:
        return packet in ASSIGNED or adds_a_change(node)
    if AUGMENTED.get(function) is packet or name_of(function) == f"{packet.__name__}_":
        return True
    return is_write(function) and adds_a_change(node)


def adds_a_change(node: torch.fx.Node) -> bool:
    """Whether it is x + (y - x), summed up or not, by which what is written through `expand` reaches x."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    first, change = node.args
    while isinstance(change, torch.fx.Node) and getattr(change.target, "overloadpacket", None) in (aten.sum, aten.view):
        change = change.args[0]
    return isinstance(change, torch.fx.Node) and change.target is aten.sub.Tensor and change.args[1] is first
