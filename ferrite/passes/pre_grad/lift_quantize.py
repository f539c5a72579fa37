"""Quantise first, move afterwards: next to what computed the numbers, quantising can become part of that kernel.

    Q(view(transpose(y)))  =  view(transpose(Q(y)))

Quantising looks at each element alone, so it commutes with whatever only moves elements. With a scale per channel the
channels must be followed through the moves, which a reshape does not allow.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, storages_of
from ferrite.passes.pre_grad.predicates import sole_user
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
OPERATORS = torch_api.quantized_decomposed()
PER_TENSOR = (
    (
        OPERATORS.quantize_per_tensor.default,
        OPERATORS.quantize_per_tensor.tensor,
        OPERATORS.quantize_per_tensor.tensor2,
    )
    if OPERATORS is not None
    else ()
)
PER_CHANNEL = (OPERATORS.quantize_per_channel.default,) if OPERATORS is not None else ()
MOVES = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int),
        *(aten.transpose.int, aten.permute.default, aten.t.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    }
)


def lift(site: Site) -> Any:
    """One quantize above the moves before it."""
    chain = moves_before(site)
    if isinstance(chain, Refusal):
        return chain
    if site.node.target in PER_CHANNEL and has_odd_strides(site.node):
        return Refusal("eager lays out a dimension of size one in its own way, and the result is returned")
    given = dict(site.arguments)
    for move in chain:  # from the quantize upwards
        if site.node.target in PER_CHANNEL:
            axis = axis_before(move, given["axis"])
            if axis is None:
                return Refusal(f"the channels cannot be followed through {move.name}")
            given["axis"] = axis
    given["input"] = chain[-1].args[0]
    value = site.call(site.node.target, *given.values())
    for move in reversed(chain):
        value = site.call(move.target, value, *move.args[1:], **move.kwargs)
    site.through(*chain)
    return value


def moves_before(site: Site) -> list[torch.fx.Node] | Refusal:
    """The moves that lead to a quantize, the last one first; what they move is computed for them alone."""
    chain: list[torch.fx.Node] = []
    current: Any = site.arguments["input"]
    reader = site.node
    while isinstance(current, torch.fx.Node) and current.target in MOVES:
        if sole_user(current) is not reader:
            return Refusal(f"{current.name} is read by others too")
        chain.append(current)
        current, reader = current.args[0], current
    if not chain:
        return Refusal("nothing is moved before it")
    if not isinstance(current, torch.fx.Node) or current.op in ("placeholder", "get_attr"):
        return Refusal("nothing that it could be fused with computes the numbers")
    if sole_user(current) is not reader:
        return Refusal(f"{current.name} is read by others too")
    return chain


def has_odd_strides(node: torch.fx.Node) -> bool:
    """Whether a caller can see strides of which a kernel's fake says something else: those of dimensions of one."""
    alone = any(not torch_api.known_true(size != 1) for size in fake_value(node).shape)
    returned = (storages_of(each) for each in node.graph.output_node().all_input_nodes)
    return alone and not storages_of(node).isdisjoint(frozenset().union(*returned))


def axis_before(move: torch.fx.Node, axis: Any) -> int | None:
    """Where the channels were before a move; None if that cannot be said."""
    operand: Any = move.args[0]
    rank: int = fake_value(operand).dim()
    given = arguments_of(move)
    if not isinstance(axis, int):
        return None
    axis = axis % int(fake_value(move).dim())
    if move.target is aten.permute.default:
        return int(given["dims"][axis]) % rank
    if move.target is aten.transpose.int or move.target is aten.t.default:
        swapped: tuple[int, int] = (given.get("dim0", 0) % rank, given.get("dim1", -1) % rank)
        return swapped[1 - swapped.index(axis)] if axis in swapped else axis
    if move.target is aten.unsqueeze.default:
        dim: int = given["dim"] % (rank + 1)
        return None if axis == dim else axis - (dim < axis)
    if move.target is aten.squeeze.dim:
        gone = fake_value(move).dim() < rank and given["dim"] % rank <= axis
        return int(axis + gone)
    return None


# --- what it fires on -------------------------------------------------------------------------------------------------


def quantized(x: Any) -> Any:
    return OPERATORS.quantize_per_tensor(x, 0.05, 3, -128, 127, torch.int8)  # type: ignore[union-attr]


def quantized_by(x: Any, scale: Any, zero: Any) -> Any:
    return OPERATORS.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)  # type: ignore[union-attr]


def per_channel(x: Any, scales: Any, zeros: Any, axis: int) -> Any:
    call = OPERATORS.quantize_per_channel.default  # type: ignore[union-attr]
    return call(x, scales, zeros, axis, -128, 127, torch.int8)


def shared_view(x: Any) -> Any:
    moved = x.relu().transpose(1, 2)
    return quantized(moved), moved + 1


def cube() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 4)]


def channels() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 4), torch.rand(3) + 0.1, torch.tensor([0, 3, -5])]


LIFT = NodeRule(
    name="lift_quantize",
    purpose="quantising moves above views, next to what computed the numbers",
    targets=(*PER_TENSOR, *PER_CHANNEL),
    rewrite=lift,
    examples=(
        Case("three moves", lambda x: quantized(x.relu().transpose(1, 2).unsqueeze(0).reshape(2, 12)), cube),
        Case(
            "the scale is a tensor",
            lambda x, scale, zero: quantized_by(torch.flatten(x.tanh(), 1), scale, zero),
            lambda: [*cube(), torch.tensor(0.05), torch.tensor(3)],
        ),
        Case(
            "channels behind a permutation",
            lambda x, scales, zeros: per_channel(x.relu().permute(2, 0, 1), scales, zeros, 2),
            channels,
        ),
        Case(
            "channels behind a new dimension",
            lambda x, scales, zeros: per_channel(x.relu().unsqueeze(1).transpose(2, 3), scales, zeros, 3) + 1,
            channels,
        ),
    ),
    near_misses=(
        Case("the view has another reader", shared_view, cube),
        Case("an input, which nothing computes", lambda x: quantized(x.transpose(1, 2)), cube),
        Case(
            "a dimension of one that the caller sees",
            lambda x, scales, zeros: per_channel(x.relu().unsqueeze(0), scales, zeros, 2),
            channels,
        ),
        Case("nothing is moved", lambda x: quantized(x.relu()), cube),
        Case(
            "channels behind a reshape",
            lambda x, scales, zeros: per_channel(x.relu().reshape(2, 3, 2, 2), scales, zeros, 1),
            channels,
        ),
        Case(
            "the bits are read as another type",
            lambda x: quantized(x.abs().view(torch.int32).view(torch.float32)),
            cube,
        ),
    ),
)


@pre_grad_pass(rules=(LIFT,))
def quant_lift_up(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Quantising moves above views, next to what computed the numbers."""
    return apply_rules(gm, (LIFT,), context)
