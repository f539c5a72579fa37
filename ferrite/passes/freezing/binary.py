"""Arithmetic with constants behind a layer becomes part of its constant weights.

    conv(x; W, b) * c + d       =>      conv(x; W * c, b * c + d)           c, d: numbers, or one per output channel
    batch_norm(conv(x; W, b))   =>      conv(x; W * g, (b - mean) * g + beta)       g = gamma / sqrt(var + eps)

So for matrix products, also where a reshape that leaves the columns alone stands between. And so where the result of
a layer in half precision is cast to float32 for the arithmetic and back behind it: the casts go, too. The new weights
are computed at once, in float32 or wider, and rounded to the type of the old ones; they are not taken where they would
not be finite. A layer that others read too stays as it is, and so does one whose weight others read: the weight would
be kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.passes.freezing.binary_cases import (
    BINARY_EXAMPLES,
    BINARY_NEAR_MISSES,
    NORM_EXAMPLES,
    NORM_NEAR_MISSES,
)
from ferrite.passes.freezing.fold import fold_constants
from ferrite.passes.freezing.layers import (
    LAYERS,
    RESHAPES,
    FrozenLayer,
    NewWeights,
    again,
    layer_at,
    overflows,
    rounded,
    shared_weight,
    sole_reader,
)
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.converts import POINTLESS_CONVERT
from ferrite.passes.shared.facts import is_finite, only_cast
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
ADDING: dict[Any, float] = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}
SCALING: dict[Any, Callable[..., torch.Tensor]] = {aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div}
COMMUTING = frozenset({aten.add.Tensor, aten.mul.Tensor})
MAX_STEPS_BETWEEN_CASTS = 16  # of arithmetic between two casts
ROUNDS = 4  # of folding arithmetic, and then what has become constant by that
# Batch norms, and what they call the number that is added to the variance.
NORMS: dict[Any, str] = {
    aten._native_batch_norm_legit_no_training.default: "eps",
    aten._native_batch_norm_legit.default: "eps",
    aten.native_batch_norm.default: "eps",
    aten.cudnn_batch_norm.default: "epsilon",
}
# What may stand between two casts.
PASSED = frozenset({*ADDING, *SCALING, *NORMS, *RESHAPES})


@dataclass(frozen=True)
class Chain:
    """A layer, the reshape and the cast behind it if there are any, and the only one that reads the result."""

    layer: FrozenLayer
    between: tuple[torch.fx.Node, ...]  # from the layer on
    reader: torch.fx.Node

    @property
    def last(self) -> torch.fx.Node:
        return self.between[-1] if self.between else self.layer.node


def chain_at(node: torch.fx.Node) -> Chain | Refusal:
    layer = layer_at(node)
    if isinstance(layer, Refusal):
        return layer
    between: list[torch.fx.Node] = []
    reader = sole_reader(node)
    while reader is not None and (reader.target in RESHAPES or only_cast(reader) is not None):
        if reader.target in RESHAPES:
            if layer.channel != -1 or not torch_api.known_equal(fake_value(reader).shape[-1], layer.channels):
                return Refusal("a reshape mixes the channels")
        elif not is_detour(reader, layer):
            return Refusal("the result is wanted in another type")
        between.append(reader)
        reader = sole_reader(reader)
    return Chain(layer, tuple(between), reader) if reader is not None else Refusal("its result is read more than once")


def is_detour(cast: torch.fx.Node, layer: FrozenLayer) -> bool:
    """Whether a cast to float32 is taken back behind some arithmetic, so that no digit of it is seen."""
    half = fake_value(layer.node).dtype
    if half not in HALVES or fake_value(cast).dtype is not torch.float32:
        return False
    reader = sole_reader(cast)
    for _ in range(MAX_STEPS_BETWEEN_CASTS):
        if reader is None or reader.target not in PASSED:
            break
        items = norm_results(reader)
        reader = sole_reader(items[0] if len(items) == 1 else reader)
    return reader is not None and only_cast(reader) is not None and fake_value(reader).dtype is half


def written_anew(site: Site, chain: Chain, weights: NewWeights | Refusal) -> Any:
    """The layer with other weights, in the place of its reader."""
    if isinstance(weights, Refusal):
        return weights
    if overflows(chain.layer, *weights):
        return Refusal("a new weight would not be finite")
    result = chain.layer.with_weights(site, *weights)
    site.through(*chain.between)
    for node in chain.between:
        result = again(site, node, result)
    return (result,)


# --- sums and products ------------------------------------------------------------------------------------------------


def arithmetic_behind(node: torch.fx.Node) -> list[torch.fx.Node] | Refusal:
    chain = chain_at(node)
    if isinstance(chain, Refusal):
        return chain
    if chain.reader.target not in ADDING and chain.reader.target not in SCALING:
        return Refusal(f"{chain.reader.name} does not add, subtract, multiply or divide")
    return [chain.reader]


def fold(site: Site) -> Any:
    chain = chain_at(site.node)
    assert isinstance(chain, Chain)
    given = arguments_of(chain.reader)
    numbers = per_channel(chain, given)
    if isinstance(numbers, Refusal):
        return numbers
    change = added if chain.reader.target in ADDING else scaled
    return written_anew(site, chain, change(chain, numbers, given))


def added(chain: Chain, numbers: torch.Tensor, given: Mapping[str, Any]) -> NewWeights | Refusal:
    if type(given["alpha"]) not in (int, float):
        return Refusal("the factor of the constant is not known")
    with on_real_tensors():
        bias = chain.layer.wide_bias() + ADDING[chain.reader.target] * given["alpha"] * numbers
        return rounded(chain.layer, None, bias)


def scaled(chain: Chain, numbers: torch.Tensor, given: Mapping[str, Any]) -> NewWeights | Refusal:
    layer, change = chain.layer, SCALING[chain.reader.target]
    if (refused := shared_weight(layer)) is not None:
        return refused
    with on_real_tensors():
        if change is torch.div and not numbers.all():
            return Refusal("it divides by zero")
        return rounded(layer, layer.along_channels(numbers, change), change(layer.wide_bias(), numbers))


def per_channel(chain: Chain, given: Mapping[str, Any]) -> torch.Tensor | Refusal:
    """The other operand of the reader as one number per output channel, in the wide type."""
    layer, shape, other = chain.layer, fake_value(chain.reader).shape, given["other"]
    if given["self"] is not chain.last:
        other = given["self"]
        if chain.reader.target not in COMMUTING:
            return Refusal("the layer is subtracted from something, or divides it")
    value = number(other, layer) if type(other) in (int, float) else constant_of(other)
    if value is None:
        return Refusal("the other operand is not constant")
    if value.dtype is torch.bool or value.is_complex():
        return Refusal("the constant is not a real number")
    channel, offset = layer.channel % len(shape), len(shape) - value.dim()
    if any(size != 1 and offset + axis != channel for axis, size in enumerate(value.shape)):
        return Refusal("the constant varies over more than the channels")
    if value.numel() not in (1, layer.channels):
        return Refusal("the constant does not have one number per channel")
    with on_real_tensors():
        numbers = value.to(layer.weight.device, layer.wide).reshape(-1).expand(layer.channels)
        return numbers if is_finite(numbers) else Refusal("the constant is not finite")


def number(value: float, layer: FrozenLayer) -> torch.Tensor:
    with on_real_tensors():
        return torch.tensor(float(value), dtype=layer.wide, device=layer.weight.device)


# --- batch norms ------------------------------------------------------------------------------------------------------


def norm_results(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Those results of a norm that somebody reads."""
    return [item for item in node.users if item.users] if node.target in NORMS else []


def norm_behind(node: torch.fx.Node) -> list[torch.fx.Node] | Refusal:
    """What takes the result out of the norm's tuple."""
    chain = chain_at(node)
    if isinstance(chain, Refusal):
        return chain
    if chain.reader.target not in NORMS or arguments_of(chain.reader).get("training", False) is not False:
        return Refusal("there is no batch norm in eval mode behind it")
    if any(node.target in RESHAPES for node in chain.between):
        return Refusal("the channels of the norm are not those of the layer")
    items = norm_results(chain.reader)
    if len(items) != 1 or items[0].args != (chain.reader, 0):
        return Refusal("more than the result of the norm is read")
    return items


def fold_norm(site: Site) -> Any:
    chain = chain_at(site.node)
    assert isinstance(chain, Chain)
    layer, given = chain.layer, arguments_of(chain.reader)
    names = ("weight", "bias", "running_mean", "running_var")
    values = {name: constant_of(given[name]) for name in names}
    if any(values[name] is None and given[name] is not None for name in names):
        return Refusal("a number of the norm is not constant")
    if (refused := shared_weight(layer)) is not None:
        return refused
    site.through(chain.reader)
    return written_anew(
        site, chain, normalised(layer, [values[name] for name in names], given[NORMS[chain.reader.target]])
    )


def normalised(layer: FrozenLayer, numbers: list[torch.Tensor | None], epsilon: float) -> NewWeights:
    """Weight and bias with gamma, beta, mean and variance in them."""
    with on_real_tensors():
        gamma, beta, mean, variance = (value.to(layer.wide) if value is not None else None for value in numbers)
        assert mean is not None
        assert variance is not None
        scale = (variance + epsilon).rsqrt()
        scale = scale if gamma is None else scale * gamma
        bias = (layer.wide_bias() - mean) * scale
        return rounded(layer, layer.along_channels(scale, torch.mul), bias if beta is None else bias + beta)


BINARY_RULES = (
    NodeRule(
        name="fold_arithmetic",
        purpose="a constant that is added to a layer, or that scales it, becomes part of its weights",
        targets=LAYERS,
        roots=arithmetic_behind,
        rewrite=fold,
        examples=BINARY_EXAMPLES,
        near_misses=BINARY_NEAR_MISSES,
        numerics="rounded",
    ),
    NodeRule(
        name="fold_batch_norm",
        purpose="a batch norm in eval mode becomes part of the constant weights of the layer before it",
        targets=LAYERS,
        roots=norm_behind,
        rewrite=fold_norm,
        examples=NORM_EXAMPLES,
        near_misses=NORM_NEAR_MISSES,
        numerics="rounded",
    ),
)


@graph_pass(stage="freeze", rules=BINARY_RULES)
def binary_folding(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Arithmetic with constants, and batch norms in eval mode, become part of the weights before them."""
    total = 0
    for _ in range(ROUNDS):
        made = apply_rules(gm, (*BINARY_RULES, POINTLESS_CONVERT), context)
        if not made:
            break
        total += made + fold_constants(gm, context)
    return total
