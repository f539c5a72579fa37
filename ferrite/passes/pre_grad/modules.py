"""Calls of torch's own modules, as graphs from symbolic tracing hold them, become calls of operators.

Only modules whose forward is known: of exactly that type, without hooks, without parametrisation. Their parameters
are read by `get_attr`; the modules themselves are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ferrite.graph import compute, mode_of

aten = torch.ops.aten
# An operator and its arguments: a string that begins with a dot names a parameter or buffer of the module; a
# dictionary at the end holds arguments by name.
Body = tuple[Any, tuple[Any, ...]] | None


def linear(module: Any) -> Body:
    return aten.linear.default, ("input", ".weight", ".bias")


def convolution(overload: Any, with_padding_name: Any) -> Callable[[Any], Body]:
    def body(module: Any) -> Body:
        if module.padding_mode != "zeros":
            return None
        target = with_padding_name if isinstance(module.padding, str) else overload
        padding = module.padding if isinstance(module.padding, str) else list(module.padding)
        settings = (list(module.stride), padding, list(module.dilation), module.groups)
        return target, ("input", ".weight", ".bias", *settings)

    return body


def transposed(overload: Any) -> Callable[[Any], Body]:
    def body(module: Any) -> Body:
        lists = (list(module.stride), list(module.padding), list(module.output_padding))
        return overload, ("input", ".weight", ".bias", *lists, module.groups, list(module.dilation))

    return body


def batch_norm(module: Any) -> Body:
    if module.training or module.running_mean is None or module.running_var is None:
        return None
    momentum = 0.0 if module.momentum is None else module.momentum
    statistics = (".running_mean", ".running_var")
    cudnn = bool(torch.backends.cudnn.enabled)
    return aten.batch_norm.default, ("input", ".weight", ".bias", *statistics, False, momentum, module.eps, cudnn)


def layer_norm(module: Any) -> Body:
    return aten.layer_norm.default, ("input", list(module.normalized_shape), ".weight", ".bias", module.eps)


def dropout(module: Any) -> Body:
    return None if module.inplace else (aten.dropout.default, ("input", module.p, module.training))


def pointwise(overload: Any, *settings: str) -> Callable[[Any], Body]:
    def body(module: Any) -> Body:
        if getattr(module, "inplace", False):
            return None
        return overload, ("input", *(getattr(module, name) for name in settings))

    return body


def gelu(module: Any) -> Body:
    # `approximate` can only be given by name
    return (aten.gelu.default, ("input", {"approximate": module.approximate}))


BODIES: Mapping[type, Callable[[Any], Body]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution(aten.conv1d.default, aten.conv1d.padding),
    nn.Conv2d: convolution(aten.conv2d.default, aten.conv2d.padding),
    nn.Conv3d: convolution(aten.conv3d.default, aten.conv3d.padding),
    nn.ConvTranspose1d: transposed(aten.conv_transpose1d.default),
    nn.ConvTranspose2d: transposed(aten.conv_transpose2d.input),
    nn.ConvTranspose3d: transposed(aten.conv_transpose3d.input),
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.SyncBatchNorm: batch_norm,
    nn.LayerNorm: layer_norm,
    nn.Dropout: dropout,
    nn.ReLU: pointwise(aten.relu.default),
    nn.Tanh: pointwise(aten.tanh.default),
    nn.Sigmoid: pointwise(aten.sigmoid.default),
    nn.SiLU: pointwise(aten.silu.default),
    nn.GELU: gelu,
    nn.LeakyReLU: pointwise(aten.leaky_relu.default, "negative_slope"),
    nn.Hardtanh: pointwise(aten.hardtanh.default, "min_val", "max_val"),
}


def is_plain(module: nn.Module) -> bool:
    """Whether calling it runs its forward and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not parametrize.is_parametrized(module) and "forward" not in vars(module)


def called_module(gm: torch.fx.GraphModule, node: torch.fx.Node) -> nn.Module | None:
    """The module that a node calls, if it is plain and called with one operand."""
    module = gm.get_submodule(str(node.target))
    given = [*node.args, *node.kwargs.values()]
    if len(given) != 1 or set(node.kwargs) - {"input"} or not isinstance(given[0], torch.fx.Node):
        return None
    return module if is_plain(module) else None


def inline_module(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Replace the call of a known module by the call of its operator."""
    module = called_module(gm, node)
    body = BODIES[type(module)](module) if type(module) in BODIES else None
    if body is None:
        return False
    overload, arguments = body
    by_name = arguments[-1] if isinstance(arguments[-1], dict) else {}
    (operand,) = node.all_input_nodes
    by_place = arguments[:-1] if by_name else arguments
    node.args = tuple(argument_of(gm, node, module, operand, argument) for argument in by_place)
    node.op, node.target, node.kwargs = "call_function", overload, by_name
    return True


def argument_of(gm: torch.fx.GraphModule, node: torch.fx.Node, module: Any, operand: Any, argument: Any) -> Any:
    if argument == "input":
        return operand
    if not isinstance(argument, str) or not argument.startswith("."):
        return argument
    if getattr(module, argument[1:]) is None:
        return None
    with gm.graph.inserting_before(node):
        attribute = gm.graph.get_attr(f"{node.target}{argument}")
    attribute.meta["val"], _ = compute(attribute, mode_of(gm.graph))
    return attribute
