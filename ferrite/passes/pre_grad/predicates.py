"""What several rules of the stage ask of a node. Calls are ATen overloads here (see `spelling`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from ferrite.capture import torch_api
from ferrite.graph import GradientFlow, Storage, fake_value, mutates, says_so, storages_of
from ferrite.rewrite import arguments_of, count_uses

aten = torch.ops.aten

# --- who reads it -----------------------------------------------------------------------------------------------------


def sole_user(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one node that reads another, once; None if there are more readers, or it reads it twice, as cat([a, a])."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if count_uses(user, node) == 1 else None


def is_returned(node: torch.fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def written_memory(graph: torch.fx.Graph) -> frozenset[Storage]:
    """The memory that some call of the graph is given to write into. Linear."""
    writers = (node for node in graph.nodes if mutates(node))
    return frozenset().union(*(storages_of(operand) for node in writers for operand in node.all_input_nodes))


def requires_grad(*nodes: torch.fx.Node) -> bool | None:
    """Whether all these values require a gradient, or none of them; None where they differ. Linear."""
    if len(nodes) == 1 and not nodes[0].all_input_nodes:
        return says_so(nodes[0])  # made of nothing: its own word is enough
    required = GradientFlow(nodes[0].graph).required
    flags = {node in required for node in nodes}
    return flags.pop() if len(flags) == 1 else None


def is_plain(value: Any) -> bool:
    """Whether a value is an ordinary tensor: strided, and not of a class with rules of its own."""
    return torch_api.is_fake(value) and value.layout is torch.strided and not value.is_quantized


# --- views ------------------------------------------------------------------------------------------------------------

# They change the shape, never the order of the elements.
SHAPE_VIEWS = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.view_as.default, aten.reshape_as.default),
        *(aten.flatten.using_ints, aten.unflatten.int, aten.ravel.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    }
)


def keeps_order(node: Any) -> bool:
    """Whether a call only changes the shape of its operand, be it as a view or as a copy."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in SHAPE_VIEWS


def is_shape_view(node: Any) -> bool:
    """Whether a call is a view of its operand with another shape; a reshape that copies is none, nor view(dtype)."""
    if not keeps_order(node) or not isinstance(node.args[0], torch.fx.Node):
        return False
    memory = storages_of(node)
    return bool(memory) and memory == storages_of(node.args[0])


class Concat(NamedTuple):
    """A cat or stack; `dim` counts from the front: `torch.stack([x, y], -1)` of matrices is ("stack", (x, y), 2)."""

    kind: Literal["cat", "stack"]
    operands: tuple[torch.fx.Node, ...]
    dim: int


def concat_view(node: Any) -> Concat | None:
    """A concat written out; None for other calls, and where the operands are one value or the dimension is not known.

    A concat into `out` writes, so it is never a call of these overloads.
    """
    if not isinstance(node, torch.fx.Node) or node.target not in (aten.cat.default, aten.stack.default):
        return None
    arguments = arguments_of(node)
    operands, dim, value = arguments["tensors"], arguments["dim"], fake_value(node)
    if not isinstance(operands, (list, tuple)) or not isinstance(value, torch.Tensor) or type(dim) is not int:
        return None
    if not operands or not all(isinstance(operand, torch.fx.Node) for operand in operands):
        return None
    kind: Literal["cat", "stack"] = "cat" if node.target is aten.cat.default else "stack"
    return Concat(kind, tuple(operands), dim % max(value.dim(), 1))


class LinearView(NamedTuple):
    input: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None


def linear_view(node: Any) -> LinearView | None:
    """The operands of a linear layer, however it was called."""
    if not isinstance(node, torch.fx.Node) or node.target is not aten.linear.default:
        return None
    given = arguments_of(node)
    found = LinearView(given["input"], given["weight"], given["bias"])
    tensors = found[:2] if found.bias is None else found
    return found if all(isinstance(item, torch.fx.Node) for item in tensors) else None


class MatmulView(NamedTuple):
    left: torch.fx.Node
    right: torch.fx.Node
    kind: Literal["matmul", "mm", "bmm"]


MATMULS: Mapping[Any, Literal["matmul", "mm", "bmm"]] = {
    aten.matmul.default: "matmul",
    aten.mm.default: "mm",
    aten.bmm.default: "bmm",
}


def matmul_view(node: Any) -> MatmulView | None:
    """The operands of a matrix product, however it was called."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function" or node.target not in MATMULS:
        return None
    given = arguments_of(node)
    left, right = given["self"], given.get("other", given.get("mat2"))
    if not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node):
        return None
    return MatmulView(left, right, MATMULS[node.target])


# --- elementwise operators of one tensor ------------------------------------------------------------------------------

Arguments = Mapping[str, Any]
# Operators with the names of their other arguments. Every kernel of an exact one gives the same bits, so that it does
# not matter where in a tensor an element stands; of the others a kernel may take the last few elements one by one, and
# round them otherwise.
EXACT: Mapping[Any, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(aten.relu.default, aten.relu6.default, aten.abs.default, aten.neg.default),
            *(aten.sign.default, aten.floor.default, aten.ceil.default, aten.trunc.default),
            *(aten.round.default, aten.logical_not.default, aten.isnan.default, aten.isinf.default),
            *(aten.isfinite.default,),
        ),
        (),
    ),
    aten.hardtanh.default: ("min_val", "max_val"),
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min",),
    aten.clamp_max.default: ("max",),
    aten.nan_to_num.default: ("nan", "posinf", "neginf"),
    aten.to.dtype: ("dtype",),
}
ROUNDED: Mapping[Any, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(aten.square.default, aten.selu.default, aten.hardswish.default, aten.hardsigmoid.default),
            *(aten.silu.default, aten.mish.default, aten.tanh.default, aten.sigmoid.default),
            *(aten.exp.default, aten.expm1.default, aten.log.default, aten.log1p.default),
            *(aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.sin.default),
            *(aten.cos.default, aten.erf.default),
        ),
        (),
    ),
    aten.round.decimals: ("decimals",),
    aten.leaky_relu.default: ("negative_slope",),
    aten.elu.default: ("alpha", "scale", "input_scale"),
    aten.celu.default: ("alpha",),
    aten.gelu.default: ("approximate",),
    aten.softplus.default: ("beta", "threshold"),
}
ELEMENTWISE: Mapping[Any, tuple[str, ...]] = {**EXACT, **ROUNDED}


class Unary(NamedTuple):
    """One call of an elementwise operator: its operand, its other arguments by name, and whether it is exact."""

    operand: torch.fx.Node
    parameters: Arguments
    exact: bool


def is_elementwise_unary(node: Any) -> Unary | None:
    """What an elementwise call of one tensor is; None for others, and where an argument is not known yet.

    Calls that write are none: they are never spelled as these overloads.
    """
    if not isinstance(node, torch.fx.Node) or node.op != "call_function" or node.target not in ELEMENTWISE:
        return None
    parameters, given = ELEMENTWISE[node.target], dict(arguments_of(node))
    operand = given.pop("self")
    if not isinstance(operand, torch.fx.Node) or any(isinstance(item, torch.fx.Node) for item in given.values()):
        return None
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {parameter.name: parameter.default_value for parameter in schema}
    if any(given[name] != defaults[name] for name in given if name not in parameters):
        return None  # a cast that is told how to copy, say
    return Unary(operand, {name: given[name] for name in parameters}, node.target in EXACT)
