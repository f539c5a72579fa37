"""Constant weights, laid out as torch's own kernels on a CPU like them best.

    addmm(b, x, W)          W stored by columns, as linear layers have it     =>      stored by rows
    convolution(x, W, b)    W stored plane by plane                           =>      channels last, and so the result

The option weight_layouts says where: nowhere, wherever it is right, or (`auto`) where it was measured to take at most
1 / 1.3 of the time (`bench/layouts.py`):

    convolutions of one by one, or of each channel alone        0.47, 0.56      taken if large
    other convolutions                                          0.91 to 0.94    left
    products of two rows or more                                0.81 to 0.95    left
    products of one row                                         1.34 to 1.51    left

A weight in another layout is another copy. So this is for weights that freezing has made anyway, by folding or joining:
the model still has its own. With the option freeze_discard_parameters it has not, and all weights are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import Storage, attribute_of, fake_value, storages_in, tensor_storages
from ferrite.machines import host_machine
from ferrite.passes.freezing.binary_cases import constant, conv, of
from ferrite.passes.freezing.layers import convolution_at, shared_weight, sole_reader
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.facts import transposed
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
NOTED = "memory of the model"  # in the module's `meta`


@graph_pass(stage="freeze", keeps_values=True)
def note_parameters(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """What the model holds is remembered, so that nothing of it is kept twice."""
    tensors = [attribute_of(node) for node in gm.graph.find_nodes(op="get_attr")]
    gm.meta[NOTED] = storages_in([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
    context.facts["constants"] += len(tensors)
    return 0


def copy_problem(site: Site, weight: torch.Tensor) -> Refusal | None:
    """Why a weight may not have another layout."""
    if site.options.weight_layouts == "off":
        return Refusal("the option weight_layouts is off")
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return Refusal("other layouts are measured for float32 on a cpu only")
    module: Any = site.node.graph.owning_module
    of_the_model: frozenset[Storage] | None = module.meta.get(NOTED)
    ours = of_the_model is not None and of_the_model.isdisjoint(tensor_storages(weight))
    if not ours and not site.options.freeze_discard_parameters:
        return Refusal("the model holds the weight, and would hold a second one")
    return None


# --- products ---------------------------------------------------------------------------------------------------------


def by_rows(site: Site) -> Any:
    matrix = site.arguments["mat2"]
    found = stored_by_columns(matrix)
    if isinstance(found, Refusal):
        return found
    if sole_reader(matrix) is not site.node:
        return Refusal(f"{matrix.name} is read by others too")
    if (refused := copy_problem(site, found)) is not None:
        return refused
    if site.options.weight_layouts == "auto":
        return Refusal("a product gains too little: the option weight_layouts is 'auto'")
    if torch_api.size_hint(fake_value(site.node).shape[0]) < host_machine().min_layout_rows:
        return Refusal("for a single row it does not pay")
    assert site.constant is not None
    with on_real_tensors():
        weight = found.contiguous()
    site.through(matrix)
    given = {**site.arguments, "mat2": site.constant("weight_by_rows", weight)}
    scales = {name: given.pop(name) for name in ("beta", "alpha") if name in given}
    return site.call(site.node.target, *given.values(), **scales)


def stored_by_columns(matrix: Any) -> torch.Tensor | Refusal:
    """A constant that lies column by column, or the transpose of one that lies row by row."""
    if not isinstance(matrix, torch.fx.Node):
        return Refusal("the matrix is not constant")
    source = transposed(matrix)
    stored = constant_of(matrix if source is None else source)
    if stored is None or (source is not None and sole_reader(source) is not matrix):
        return Refusal("the matrix is not constant, or read by others too")
    with on_real_tensors():
        found = stored if source is None else stored.t()
    return Refusal("the matrix is stored by rows already") if found.is_contiguous() else found


# --- convolutions -----------------------------------------------------------------------------------------------------


def channels_last(site: Site) -> Any:
    layer = convolution_at(site.node)
    if isinstance(layer, Refusal):
        return layer
    weight = layer.weight
    if weight.dim() != 4 or layer.arguments["transposed"] or not weight.is_contiguous():
        return Refusal("it is no convolution of images with a weight stored plane by plane")
    if weight.stride() == channels_last_stride(weight):
        return Refusal("the weight is stored channels last already")
    if (refused := shared_weight(layer) or copy_problem(site, weight)) is not None:
        return refused
    work = math.prod(map(torch_api.size_hint, fake_value(site.node).shape)) * math.prod(weight.shape[1:])
    if work < host_machine().min_weight_layout_convolution:
        return Refusal("it is too small to pay")
    if site.options.weight_layouts == "auto" and not gains_much(weight.shape, layer.arguments["groups"], work):
        return Refusal("it gains too little: the option weight_layouts is 'auto'")
    assert site.constant is not None
    with on_real_tensors():
        new = torch.empty_strided(weight.shape, channels_last_stride(weight), dtype=weight.dtype).copy_(weight)
    given = {**layer.arguments, "weight": site.constant("weight_channels_last", new)}
    return site.call(aten.convolution.default, *given.values())


def gains_much(weight: Sequence[int], groups: int, work: int) -> bool:
    """Whether a convolution of so many multiplications is one that takes at most 1 / 1.3 of the time."""
    out, each, *kernel = weight
    if groups == out and each == 1:
        return work >= host_machine().min_weight_layout_convolution
    return groups == 1 and math.prod(kernel) == 1 and work >= host_machine().min_weight_layout_pointwise


def channels_last_stride(weight: torch.Tensor) -> tuple[int, ...]:
    _, channels, height, width = weight.shape
    return (channels * height * width, 1, channels * width, channels)


# --- what they fire on ------------------------------------------------------------------------------------------------

ALL = {"freeze_discard_parameters": True, "weight_layouts": "always"}
AUTO = {"freeze_discard_parameters": True}


def linear(x: Any) -> Any:
    return torch.relu(aten.addmm.default(constant(3), x, constant(3, 4).t()))


IMAGES = of((2, 16, 32, 32))


def image(x: Any) -> Any:
    return torch.relu(conv(x, constant(16, 16, 3, 3), constant(16))).mean((2, 3))


def channel_by_channel(x: Any) -> Any:
    return conv(x, constant(16, 1, 3, 3), groups=16).relu().sum((2, 3))


def one_by_one(x: Any) -> Any:
    return conv(x, constant(64, 64, 1, 1)).relu().sum((2, 3))


BY_ROWS = NodeRule(
    name="weights_by_rows",
    purpose="a constant matrix is stored by rows",
    targets=(aten.mm.default, aten.addmm.default),
    rewrite=by_rows,
    numerics="rounded",
    examples=(
        Case("a linear layer", linear, of((5, 4)), ALL),
        Case("without bias", lambda x: aten.mm.default(x, constant(3, 4).t()), of((5, 4)), ALL),
    ),
    near_misses=(
        Case("the model has it", linear, of((5, 4)), {"weight_layouts": "always"}),
        Case("by the model", linear, of((5, 4)), AUTO),
        Case("switched off", linear, of((5, 4)), {**ALL, "weight_layouts": "off"}),
        Case("a single row", linear, of((1, 4)), ALL),
        Case("stored so already", lambda x: aten.mm.default(x, constant(4, 3)), of((5, 4)), ALL),
        Case("the matrix is an input", lambda x, w: aten.mm.default(x, w.t()), of((5, 4), (3, 4)), ALL),
        Case(
            "double precision",
            lambda x: x @ constant(3, 4, dtype=torch.float64).t(),
            of((5, 4), dtype=torch.float64),
            ALL,
        ),
    ),
)
CHANNELS_LAST = NodeRule(
    name="weights_channels_last",
    purpose="the constant weight of a convolution is stored channels last, and so is its result",
    targets=(aten.convolution.default,),
    rewrite=channels_last,
    numerics="rounded",
    layout="free",
    examples=(
        Case("three by three", image, IMAGES, ALL),
        Case("one by one", lambda x: conv(x, constant(64, 16, 1, 1)).relu().sum((2, 3)), IMAGES, ALL),
        Case("in groups", lambda x: conv(x, constant(32, 8, 3, 3), groups=2).relu().sum((2, 3)), IMAGES, ALL),
        Case("each channel alone, by the model", channel_by_channel, of((8, 16, 48, 48)), AUTO),
        Case("one by one, by the model", one_by_one, of((4, 64, 48, 48)), AUTO),
    ),
    near_misses=(
        Case("the model has it", image, IMAGES, {"weight_layouts": "always"}),
        Case("by the model", image, IMAGES, AUTO),
        Case("one by one and small, by the model", one_by_one, of((1, 64, 24, 24)), AUTO),
        Case("switched off", channel_by_channel, of((8, 16, 48, 48)), {**ALL, "weight_layouts": "off"}),
        Case("tiny", image, of((2, 16, 5, 5)), ALL),
        Case("the strides of the result are seen", lambda x: conv(x, constant(16, 16, 3, 3)), IMAGES, ALL),
        Case("transposed", lambda x: conv(x, constant(16, 16, 3, 3), transposed=True).sum((2, 3)), IMAGES, ALL),
        Case("the weight is an input", lambda x, w: conv(x, w).sum((2, 3)), of((2, 16, 32, 32), (16, 16, 3, 3)), ALL),
    ),
)
LAYOUT_RULES = (BY_ROWS, CHANNELS_LAST)


@graph_pass(stage="freeze", rules=LAYOUT_RULES)
def lay_out_weights(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Weights that freezing made are stored as the kernels like them; all weights, if the model keeps none."""
    return apply_rules(gm, LAYOUT_RULES, context)
