"""Convolutions of images much larger than their weights run with the channels side by side.

    convolution(x, w, b)        =>      clone(convolution(clone(x, channels last), w, b), contiguous)

That is how the kernels of torch work inside on CPUs, and the copies are no work of their own: kernels before and behind
write and read images either way. Two convolutions with pointwise work between them have all of it side by side.

Measured with two threads on Arm and on x86 (AVX-512), windows of 3x3 to 7x7, batches of 1 and 8: 0.39 to 0.92 of the
time where the result has more elements than the weight, and up to three times as much where it has far fewer, as the
weight, too, has to be brought into another order. Convolutions in groups are now faster and now slower. An image that
is given out as it is, as training keeps those it needs on the way back, would be there twice. Those are left.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.capture import known_contiguous, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import host_machine
from ferrite.passes.post_grad.convolutions import bare
from ferrite.passes.shared.cases import whole_numbers as of
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten


def side_by_side(site: Site) -> Any:
    given, result = site.arguments, fake_value(site.node)
    x, weight = site.value(given["input"]), site.value(given["weight"])
    if x.device.type != "cpu" or {x.dtype, weight.dtype} != {torch.float32}:
        return Refusal("it is measured for float32 on a cpu only")
    if x.ndim != 4 or given["transposed"] or given["groups"] != 1:
        return Refusal("it is no convolution of images, or transposed, or in groups")
    if any(user.op == "output" for user in given["input"].users):
        return Refusal("the image is given out as it is")
    if not known_contiguous(result) or not known_contiguous(x):
        return Refusal("channels lie side by side already, or nothing does")
    elements, weights = (math.prod(map(torch_api.size_hint, value.shape)) for value in (result, weight))
    if elements < weights:
        return Refusal("most of the work is to bring the weight into another order")
    if elements * math.prod(map(torch_api.size_hint, weight.shape[1:])) < host_machine().min_split_convolution:
        return Refusal("it is too small to pay")
    image = site.call(aten.clone.default, given["input"], memory_format=torch.channels_last)
    found = site.call(aten.convolution.default, *{**given, "input": image}.values())
    return site.call(aten.clone.default, found, memory_format=torch.contiguous_format)


# --- what it fires on -------------------------------------------------------------------------------------------------


def given_out(x: Any, weight: Any) -> Any:
    y = x * 2
    return y, bare(padding=1)(y, weight)


def already(x: Any, weight: Any) -> Any:
    return bare(padding=1)(x.permute(0, 3, 1, 2), weight)


LAYER = ((1, 16, 32, 32), (16, 16, 3, 3))

CHANNELS_LAST = NodeRule(
    name="convolution_channels_last",
    purpose="a convolution of a large image runs with the channels side by side",
    targets=(aten.convolution.default,),
    rewrite=side_by_side,
    numerics="rounded",
    examples=(
        Case("three by three", bare(padding=1), of(*LAYER)),
        Case("a batch, five by five", bare(padding=2), of((2, 16, 20, 24), (16, 16, 5, 5))),
        Case("few channels", bare(padding=1), of((1, 3, 80, 80), (16, 3, 3, 3))),
    ),
    near_misses=(
        Case("the image is given out", given_out, of(*LAYER)),
        Case("the weight is larger", bare(padding=1), of((1, 64, 20, 20), (64, 64, 3, 3))),
        Case("small", bare(padding=1), of((1, 4, 32, 32), (16, 4, 3, 3))),
        Case("groups", bare(padding=1, groups=2), of((1, 32, 32, 32), (32, 16, 3, 3))),
        Case("transposed", bare(padding=1, transposed=True), of(*LAYER)),
        Case("double precision", bare(padding=1), of(*LAYER, dtype=torch.float64)),
        Case("channels are side by side", already, of((1, 32, 32, 16), (16, 16, 3, 3))),
        Case("no image", bare(padding=1), of((1, 16, 4096), (16, 16, 3))),
    ),
)
