"""Convolutions as a GPU's library likes them.

    convolution(x, w, b)        =>      convolution(x, w) + b[:, None, None]
    convolution(x, w)           =>      convolution(clone(x, channels last), w)

The library adds no bias: torch starts a kernel of its own for it, which goes through all of the result once more. As an
addition it is part of the kernel that reads the result.

Its kernels for 16 bits go along channels that lie side by side. An image that lies otherwise is copied before every
convolution, and the result after it: on an H200 that is 75 of the 191 kernels of a ResNet-50. What follows a
convolution lays out its results as it finds its operands, so one copy at the start does for all of a model. Where
somebody would see other strides, all stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import known_contiguous
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.post_grad.convolutions import conv
from ferrite.passes.shared.cases import on_accelerator
from ferrite.passes.shared.cases import whole_numbers as of
from ferrite.passes.shared.facts import gains_nothing_by_channels_last
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def without_bias(site: Site) -> Any:
    given, result = site.arguments, fake_value(site.node)
    if result.device.type == "cpu":
        return Refusal("kernels on a cpu add the bias themselves")
    if given["bias"] is None or not result.dtype.is_floating_point:
        return Refusal("there is no bias")
    if site.value(given["bias"]).dtype != result.dtype:
        return Refusal("the bias has another type")
    bare = site.call(aten.convolution.default, *{**given, "bias": None}.values())
    ones = [1] * (site.value(given["weight"]).ndim - 2)
    sizes = [-1, *ones] if result.ndim == len(ones) + 1 else [1, -1, *ones]
    return site.call(aten.add.Tensor, bare, site.call(aten.view.default, given["bias"], sizes))


def side_by_side(site: Site) -> Any:
    given, result = site.arguments, fake_value(site.node)
    x = site.value(given["input"])
    if (problem := gains_nothing_by_channels_last(x, result, given["transposed"], given["groups"])) is not None:
        return problem
    image = site.call(aten.clone.default, given["input"], memory_format=torch.channels_last)
    found = site.call(aten.convolution.default, *{**given, "input": image}.values())
    if x.device.type == "cuda" and known_contiguous(site.value(found)):
        return Refusal("the kernel that torch takes lays out its result as before")
    return found


# --- what they fire on ------------------------------------------------------------------------------------------------


def layer(**window: Any) -> Any:
    return on_accelerator(conv(padding=1, **window))


def pooled(**window: Any) -> Any:
    def run(x: Any, weight: Any, bias: Any) -> Any:
        return torch.relu(conv(padding=1, **window)(x, weight, bias)).mean((2, 3))

    return on_accelerator(run)


IMAGES = ((2, 16, 12, 12), (16, 16, 3, 3), (16,))
IN_16_BITS = of(*IMAGES, dtype=torch.bfloat16)


def without(function: Any) -> Any:
    return on_accelerator(lambda x, weight, bias: function(x, weight, None))


CONVOLUTION_BIAS = NodeRule(
    name="convolution_bias_on_gpu",
    purpose="the bias of a convolution is added by the kernel that reads the result",
    targets=(aten.convolution.default,),
    rewrite=without_bias,
    numerics="rounded",
    examples=(
        Case("an image", layer(), of(*IMAGES)),
        Case("in 16 bits", layer(), IN_16_BITS),
        Case("channels side by side", layer(), of(*IMAGES, last=True)),
        Case("in groups", layer(groups=16), of((2, 16, 12, 12), (16, 1, 3, 3), (16,))),
        Case("a signal", layer(), of((2, 16, 12), (16, 16, 3), (16,))),
        Case("transposed", layer(transposed=True), of(*IMAGES)),
    ),
    near_misses=(
        Case("on a cpu", conv(padding=1), of(*IMAGES)),
        Case("no bias", without(conv(padding=1)), of(*IMAGES)),
    ),
)
CHANNELS_LAST_ON_GPU = NodeRule(
    name="convolution_channels_last_on_gpu",
    purpose="a convolution in 16 bits on a GPU runs with the channels side by side, and so does what follows",
    targets=(aten.convolution.default,),
    rewrite=side_by_side,
    numerics="rounded",
    layout="free",
    examples=(
        Case("an image", pooled(), IN_16_BITS),
        Case("in float16", pooled(), of(*IMAGES, dtype=torch.float16)),
        Case("one by one", pooled(), of((2, 16, 12, 12), (16, 16, 1, 1), (16,), dtype=torch.bfloat16)),
    ),
    near_misses=(
        Case("single precision", pooled(), of(*IMAGES)),
        Case("channels side by side", pooled(), of(*IMAGES, last=True, dtype=torch.bfloat16)),
        Case("in groups", pooled(groups=2), of((2, 16, 12, 12), (16, 8, 3, 3), (16,), dtype=torch.bfloat16)),
        Case("transposed", pooled(transposed=True), IN_16_BITS),
        Case("on a cpu", lambda *given: conv(padding=1)(*given).relu().mean((2, 3)), IN_16_BITS),
    ),
)
GPU_CONVOLUTION_RULES = (CONVOLUTION_BIAS, CHANNELS_LAST_ON_GPU)


@graph_pass(stage="post_grad", rules=GPU_CONVOLUTION_RULES)
def convolutions_on_gpu(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Convolutions on a GPU without bias, and with channels side by side."""
    return apply_rules(gm, GPU_CONVOLUTION_RULES, context)
