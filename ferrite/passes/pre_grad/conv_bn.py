"""A batch norm in eval mode behind a convolution or linear layer becomes part of its weights.

    BN(conv(x; W, b)) = conv(x; W * g, (b - mean) * g + beta)        g = gamma / sqrt(var + eps), one per output channel

Two passes share the algebra. `fuse_conv_bn` is for inference with the option freeze. Where the parameters are stored
in the module it computes the new ones at once; otherwise (Dynamo makes inputs of parameters) it writes the arithmetic
on them, which is constant once the parameters are. `efficient_conv_bn_eval` writes the same arithmetic while training,
so that the result of the convolution need not be kept for the backward of the norm; it is computed in every step, and
gradients reach all parameters.

The arithmetic runs in float32 or wider and is rounded to the types of the layer. Half precision could overflow on the
way to float16: there the values must be known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api, torch_state
from ferrite.errors import Refusal
from ferrite.graph import attribute, fake_value, is_stored, storages_of
from ferrite.passes.pre_grad.conv_bn_cases import conv_inputs, conv_norm, examples, near_misses
from ferrite.passes.pre_grad.predicates import sole_user
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.facts import is_finite
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
# The layers, and how many dimensions their results must have for the second one to be the channels.
LAYERS: Mapping[Any, int] = {
    aten.conv1d.default: 3,
    aten.conv1d.padding: 3,
    aten.conv2d.default: 4,
    aten.conv2d.padding: 4,
    aten.conv3d.default: 5,
    aten.conv3d.padding: 5,
    aten.conv_transpose1d.default: 3,
    aten.conv_transpose2d.input: 4,
    aten.conv_transpose3d.input: 5,
    aten.linear.default: 2,
}
TRANSPOSED = frozenset({aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input})
FOLDED_FROM = "folded_from"  # in the metadata of a node that reads a folded constant


@dataclass(frozen=True)
class Folding:
    """A layer and the norm behind it. Of the parameters, `bias`, `gamma` and `beta` may be None."""

    layer: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    mean: torch.fx.Node
    var: torch.fx.Node
    gamma: torch.fx.Node | None
    beta: torch.fx.Node | None
    eps: float
    groups: int

    @property
    def parameters(self) -> tuple[torch.fx.Node | None, ...]:
        return (self.weight, self.bias, self.mean, self.var, self.gamma, self.beta)

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the new weight and of the new bias."""
        weight = fake_value(self.weight).dtype
        return weight, fake_value(self.bias).dtype if self.bias is not None else weight

    @functools.cached_property
    def wide(self) -> torch.dtype:
        dtypes = (fake_value(node).dtype for node in self.parameters if node is not None)
        return functools.reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def channel_axis(self) -> int:
        return 1 if self.layer.target in TRANSPOSED else 0


# --- matching ---------------------------------------------------------------------------------------------------------


def folding_at(site: Site) -> Folding | Refusal:
    """The layer before a norm, if the two can be one."""
    norm, layer = site.arguments, site.arguments["input"]
    if norm["training"] is not False:
        return Refusal("the norm is not known to be in eval mode")
    if not isinstance(layer, torch.fx.Node) or layer.target not in LAYERS:
        return Refusal("there is no convolution or linear layer before the norm")
    if sole_user(layer) is not site.node:
        return Refusal(f"{layer.name} is read by others too")
    if not isinstance(norm["eps"], float) or norm["eps"] <= 0:
        return Refusal("epsilon is not a positive number")
    given = arguments_of(layer)
    found = Folding(
        layer=layer,
        weight=given["weight"],
        bias=given["bias"],
        mean=norm["running_mean"],
        var=norm["running_var"],
        gamma=norm["weight"],
        beta=norm["bias"],
        eps=norm["eps"],
        groups=given.get("groups", 1),
    )
    return shape_problem(found) or dtype_problem(found, fake_value(site.node)) or found


def shape_problem(found: Folding) -> Refusal | None:
    if not all(isinstance(node, torch.fx.Node) for node in (found.weight, found.mean, found.var)):
        return Refusal("a weight or a statistic is missing")
    result, weight = fake_value(found.layer), fake_value(found.weight)
    if result.dim() != LAYERS[found.layer.target]:
        return Refusal(f"the second of the {result.dim()} dimensions is not the channels")
    if type(found.groups) is not int:
        return Refusal("the number of groups is not known")
    channels = weight.shape[found.channel_axis] * (found.groups if found.channel_axis else 1)
    for node in found.parameters[1:]:
        if node is not None and not torch_api.known_equal(fake_value(node).numel(), channels):
            return Refusal(f"{node.name} does not have one number per channel")
    return None


def dtype_problem(found: Folding, result: torch.Tensor) -> Refusal | None:
    values = [fake_value(node) for node in found.parameters if node is not None]
    if not all(value.is_floating_point() for value in values):
        return Refusal("the numbers are not real")
    if fake_value(found.layer).dtype != result.dtype:
        return Refusal("the norm changes the dtype")
    if fake_value(found.layer).dtype != fake_value(found.weight).dtype:
        return Refusal("under autocast the layer would round its weight behind the norm")
    return None


# --- the arithmetic ---------------------------------------------------------------------------------------------------

Call = Callable[..., Any]


def folded(found: Folding, call: Call, operands: tuple[Any, ...]) -> tuple[Any, Any]:
    """The new weight and bias. `call` writes nodes, or computes: the operands are nodes or tensors accordingly."""
    weight, bias, mean, var, gamma, beta = (
        widened(call, operand, fake_value(node), found.wide) if node is not None else None
        for operand, node in zip(operands, found.parameters, strict=True)
    )
    scale = call(aten.rsqrt.default, call(aten.add.Tensor, var, found.eps))
    scale = scale if gamma is None else call(aten.mul.Tensor, scale, gamma)
    shift = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
    shift = call(aten.mul.Tensor, shift, scale)
    shift = shift if beta is None else call(aten.add.Tensor, shift, beta)
    scaled = scaled_weight(found, call, weight, scale)
    weight_dtype, bias_dtype = found.dtypes
    return narrowed(call, scaled, found.wide, weight_dtype), narrowed(call, shift, found.wide, bias_dtype)


def scaled_weight(found: Folding, call: Call, weight: Any, scale: Any) -> Any:
    """Every channel times its scale. The channels of a transposed convolution lie group by group in two dimensions."""
    rest = [1] * (fake_value(found.weight).dim() - 2)
    if found.groups == 1 or not found.channel_axis:
        shape = [1, -1, *rest] if found.channel_axis else [-1, 1, *rest]
        return call(aten.mul.Tensor, weight, call(aten.reshape.default, scale, shape))
    apart = call(aten.unflatten.int, weight, 0, [found.groups, -1])
    scaled = call(aten.mul.Tensor, apart, call(aten.reshape.default, scale, [found.groups, 1, -1, *rest]))
    return call(aten.flatten.using_ints, scaled, 0, 1)


def widened(call: Call, operand: Any, value: torch.Tensor, wide: torch.dtype) -> Any:
    return operand if value.dtype == wide else call(aten.to.dtype, operand, wide)


def narrowed(call: Call, operand: Any, wide: torch.dtype, dtype: torch.dtype) -> Any:
    return operand if dtype == wide else call(aten.to.dtype, operand, dtype)


# --- the two rules ----------------------------------------------------------------------------------------------------


def fold(site: Site) -> Any:
    if not site.options.freeze:
        return Refusal("the option freeze is off")
    found = folding_at(site)
    if isinstance(found, Refusal):
        return found
    for node in found.parameters:
        if node is not None and not site.written.isdisjoint(storages_of(node)):
            return Refusal(f"{node.name} is written in the graph")
    tensors = stored_tensors(found) if site.is_inference else None
    pair = written_out(site, found) if tensors is None else computed(site, found, tensors)
    return pair if isinstance(pair, Refusal) else replacement(site, found, *pair)


def fold_live(site: Site) -> Any:
    if not site.options.eval_conv_bn or site.options.freeze:
        return Refusal("the option eval_conv_bn is off, or freeze is on")
    found = folding_at(site)
    if isinstance(found, Refusal):
        return found
    pair = written_out(site, found)
    return pair if isinstance(pair, Refusal) else replacement(site, found, *pair)


def written_out(site: Site, found: Folding) -> tuple[Any, Any] | Refusal:
    """The arithmetic as nodes, computed when the graph runs."""
    if torch.float16 in found.dtypes:
        return Refusal("a folded weight could overflow in float16")
    return folded(found, site.call, found.parameters)


def computed(site: Site, found: Folding, tensors: tuple[Any, ...]) -> tuple[Any, Any] | Refusal:
    """The arithmetic done now; layers with the same parameters share the result."""
    key = (*map(id, tensors), found.eps, found.groups, found.channel_axis)
    names = ("conv_bn_weight", "conv_bn_bias")
    known = {node.meta.get(FOLDED_FROM): node for node in site.node.graph.find_nodes(op="get_attr")}
    if all((name, key) in known for name in names):
        module = site.node.graph.owning_module
        pair = [attribute(module, str(known[name, key].target)) for name in names]  # type: ignore[arg-type]
    else:
        with torch.no_grad():
            pair = [tensor.detach() for tensor in folded(found, run, tensors)]
        sources = (tensor for tensor in tensors if tensor is not None)
        if all(map(is_finite, sources)) and not all(map(is_finite, pair)):
            return Refusal("a folded number would overflow")
    assert site.constant is not None
    nodes = [site.constant(name, tensor) for name, tensor in zip(names, pair, strict=True)]
    for name, node in zip(names, nodes, strict=True):
        node.meta[FOLDED_FROM] = (name, key)
    return nodes[0], nodes[1]


def run(target: Any, *args: Any) -> Any:
    return target(*args)


def stored_tensors(found: Folding) -> tuple[Any, ...] | None:
    """The parameters themselves, if all are kept by the module, and are its own. A module of Dynamo's may keep those of
    the user's, which may change: freezing watches them once they are inputs."""
    module = found.layer.graph.owning_module
    if module is not None and torch_state.is_from_dynamo(module):
        return None
    tensors: list[Any] = []
    for node in found.parameters:
        if node is None:
            tensors.append(None)
        elif node.op != "get_attr" or module is None or not is_stored(module, str(node.target)):
            return None
        else:
            tensors.append(attribute(module, str(node.target), node))
    real = all(
        tensor is None or (isinstance(tensor, torch.Tensor) and not torch_api.is_fake(tensor)) for tensor in tensors
    )
    return tuple(tensors) if real else None


def replacement(site: Site, found: Folding, weight: Any, bias: Any) -> Any:
    """The layer once more, with other parameters and everything else as it was."""
    site.through(found.layer)
    given = {**arguments_of(found.layer), "weight": weight, "bias": bias}
    return site.call(found.layer.target, *given.values())


FOLD = NodeRule(
    name="fold_conv_bn",
    purpose="a batch norm in eval mode is part of the frozen weights of the layer before it",
    targets=(aten.batch_norm.default,),
    rewrite=fold,
    examples=examples(freeze=True),
    near_misses=(
        *near_misses(freeze=True),
        Case("the option freeze is off", conv_norm, conv_inputs),
    ),
    numerics="rounded",
)
FOLD_LIVE = NodeRule(
    name="eval_conv_bn",
    purpose="a batch norm in eval mode is part of the weights of the layer before it, computed in every step",
    targets=(aten.batch_norm.default,),
    rewrite=fold_live,
    examples=examples(eval_conv_bn=True),
    near_misses=(
        *near_misses(eval_conv_bn=True),
        Case("weights are frozen", conv_norm, conv_inputs, {"eval_conv_bn": True, "freeze": True}),
    ),
    numerics="rounded",
)


@pre_grad_pass(rules=(FOLD,), scope="inference")
def fuse_conv_bn(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Batch norms in eval mode become part of the weights before them, with the option freeze."""
    return apply_rules(gm, (FOLD,), context) if context.options.freeze else 0


@pre_grad_pass(rules=(FOLD_LIVE,))
def efficient_conv_bn_eval(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The same while training, with the option eval_conv_bn: the result of the layer need not be kept."""
    return apply_rules(gm, (FOLD_LIVE,), context) if context.options.eval_conv_bn else 0
