"""How long the nodes of a graph take, from their operations and bytes: what collectives can hide behind.

Rough, and the same on every rank: nothing is measured here, and nothing asked of the machine at hand but its kind.
"""

from __future__ import annotations

import operator

import torch

from ferrite.capture import is_operator, is_view
from ferrite.graph import fake_value, is_elementwise, leaves, storages_of
from ferrite.machines import AnyMachine
from ferrite.passes.post_grad.distributed.exchanges import BY_TARGET, WAIT, bytes_of, is_tensor
from ferrite.passes.shared.flops import flops_of_call

aten = torch.ops.aten
# What moves along with a collective: views, and copies that prepare its operand or take its result apart.
LIGHT = (
    aten._to_copy.default,
    aten.clone.default,
    aten.cat.default,
    aten.reshape.default,
    aten.split_with_sizes.default,
    aten.split.Tensor,
    torch.ops.prims.convert_element_type.default,
)


def is_light(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target is operator.getitem or node.target in LIGHT or is_view_call(node)


def is_view_call(node: torch.fx.Node) -> bool:
    """Whether a node gives its operand's memory: `reshape` may, or else copies."""
    if not is_operator(node.target) or not is_view(node.target):
        return False
    own = storages_of(node)
    return not own or any(own & storages_of(operand) for operand in node.all_input_nodes)


def operations_of(node: torch.fx.Node) -> int:
    """Multiplications and additions of a matrix product, a convolution or attention; 0 of anything else."""
    return flops_of_call(node) or 0


def seconds_of(node: torch.fx.Node, machine: AnyMachine, operations: int) -> float:
    """Elementwise work is taken to be part of what is before it, but for its result."""
    if node.op != "call_function" or node.target is WAIT or node.target in BY_TARGET or is_light(node):
        return 0.0
    results = [leaf for leaf in leaves(fake_value(node)) if is_tensor(leaf)]
    if not results:
        return 0.0
    size = sum(map(bytes_of, results))
    if not is_elementwise(node.target):
        given = (leaf for operand in node.all_input_nodes for leaf in leaves(fake_value(operand)) if is_tensor(leaf))
        size += sum(map(bytes_of, given))
    moving = size / machine.copy_bytes_per_second
    itemsize = max(results[0].dtype.itemsize, 1)
    return max(moving, operations / machine.flops_per_second(itemsize)) if operations else moving
