"""Layers with constant weights, and the same layer with other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.facts import is_finite
from ferrite.rewrite import Site, arguments_of

aten = torch.ops.aten
LAYERS = (aten.convolution.default, aten.mm.default, aten.addmm.default)
NewWeights = tuple[torch.Tensor | None, torch.Tensor]  # a weight, None for the old one, and a bias
RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})


@dataclass(frozen=True)
class FrozenLayer:
    """A convolution or product with a constant weight, and a constant bias or none.

    `axis` is where the weight has its output channels, group by group if there are `groups`; `channel` is where the
    result has them.
    """

    node: torch.fx.Node
    arguments: Mapping[str, Any]
    weight: torch.Tensor
    bias: torch.Tensor | None
    axis: int
    groups: int
    channels: int
    channel: int

    @property
    def wide(self) -> torch.dtype:
        """The type that new weights are computed in."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def along_channels(self, numbers: torch.Tensor, change: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The weight changed by one number per output channel: `torch.mul` or `torch.div`."""
        weight, rest = self.weight.to(self.wide), [1] * (self.weight.dim() - 2)
        if self.axis == 1 and self.groups > 1:  # of a transposed convolution: [in, out / groups, ...]
            apart = weight.unflatten(0, (self.groups, -1))
            return change(apart, numbers.reshape(self.groups, 1, -1, *rest)).flatten(0, 1)
        return change(weight, numbers.reshape(1, -1, *rest) if self.axis else numbers.reshape(-1, 1, *rest))

    def wide_bias(self) -> torch.Tensor:
        if self.bias is None:
            return torch.zeros(self.channels, dtype=self.wide, device=self.weight.device)
        return self.bias.to(self.wide)

    def with_weights(self, site: Site, weight: torch.Tensor | None, bias: torch.Tensor) -> torch.fx.Node:
        """The layer written once more; None leaves the weight as it is."""
        assert site.constant is not None
        old = self.arguments
        if self.node.target is aten.convolution.default:
            new = old["weight"] if weight is None else site.constant("layer_weight", weight)
            given = {**old, "weight": new, "bias": site.constant("layer_bias", bias)}
            return site.call(aten.convolution.default, *given.values())  # type: ignore[no-any-return]
        left = old["self"] if self.node.target is aten.mm.default else old["mat1"]
        right = old["mat2"] if weight is None else site.constant("layer_weight", weight)
        return site.call(aten.addmm.default, site.constant("layer_bias", bias), left, right)  # type: ignore[no-any-return]


def layer_at(node: torch.fx.Node) -> FrozenLayer | Refusal:
    """The layer that a node calls, if its weights are known."""
    found = convolution_at(node) if node.target is aten.convolution.default else product_at(node)
    if isinstance(found, Refusal):
        return found
    if not found.weight.is_floating_point() or (found.bias is not None and not found.bias.is_floating_point()):
        return Refusal("the weights are not real numbers")
    if not torch_api.known_equal(fake_value(node).shape[found.channel], found.channels):
        return Refusal("the channels of the result are not those of the weight")
    return found


def convolution_at(node: torch.fx.Node) -> FrozenLayer | Refusal:
    given = arguments_of(node)
    weight, bias = constant_of(given["weight"]), constant_of(given["bias"])
    if weight is None or (bias is None and given["bias"] is not None):
        return Refusal("the weight or the bias is not constant")
    if fake_value(node).dim() != weight.dim():
        return Refusal("the second dimension is not the channels")
    transposed, groups = given["transposed"], given["groups"]
    if type(groups) is not int or type(transposed) is not bool:
        return Refusal("the kind of convolution is not known")
    axis = int(transposed)
    channels = weight.shape[axis] * (groups if transposed else 1)
    return FrozenLayer(node, given, weight, bias, axis, groups, channels, channel=1)


def product_at(node: torch.fx.Node) -> FrozenLayer | Refusal:
    given = arguments_of(node)
    weight = constant_of(given["mat2"])
    if weight is None:
        return Refusal("the matrix is not constant")
    bias = None
    if node.target is aten.addmm.default:
        bias = constant_of(given["self"])
        if bias is None:
            return Refusal("the bias is not constant")
        if given["beta"] != 1 or given["alpha"] != 1:
            return Refusal("the product or the bias is scaled")
        if bias.dim() > 1 and bias.shape[0] != 1:
            return Refusal("the bias has more than one row")
        if bias.numel() != weight.shape[1]:
            return Refusal("the bias does not have one number per column")
        with on_real_tensors():
            bias = bias.reshape(-1)
    return FrozenLayer(node, given, weight, bias, axis=1, groups=1, channels=weight.shape[1], channel=-1)


def again(site: Site, node: torch.fx.Node, operand: torch.fx.Node) -> torch.fx.Node:
    """A call once more, on another first operand."""
    first = next(iter(arguments_of(node)))
    others = {name: value for name, value in node.kwargs.items() if name != first}
    made: torch.fx.Node = site.call(node.target, operand, *node.args[1:], **others)
    return made


def sole_reader(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one node that reads a value, whatever else it reads; None where there are several, or the caller gets it."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op != "output" else None


def shared_weight(layer: FrozenLayer) -> Refusal | None:
    """A weight that others read stays in memory: a changed one would be a second copy."""
    name = "weight" if layer.node.target is aten.convolution.default else "mat2"
    node = layer.arguments[name]
    return None if sole_reader(node) is layer.node else Refusal(f"{node.name} is read by others too")


def rounded(layer: FrozenLayer, weight: torch.Tensor | None, bias: torch.Tensor) -> NewWeights:
    """New weights in the types of the old ones."""
    bias_type = layer.weight.dtype if layer.bias is None else layer.bias.dtype
    return None if weight is None else weight.to(layer.weight.dtype), bias.to(bias_type)


def overflows(layer: FrozenLayer, weight: torch.Tensor | None, bias: torch.Tensor) -> bool:
    """Whether a new number is infinite or none though the old ones were numbers."""
    old = [layer.weight] + ([layer.bias] if layer.bias is not None else [])
    new = [bias] + ([weight] if weight is not None else [])
    with on_real_tensors():
        return all(map(is_finite, old)) and not all(map(is_finite, new))
