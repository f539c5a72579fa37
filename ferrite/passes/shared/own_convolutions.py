"""Which convolutions are kernels of our own, and the operators that they become.

Passes of two stages ask: `post_grad.own_convolutions`, and `freezing.panels`, which stores constant weights as the
kernels read them. What is decided here is decided nowhere else.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ferrite.capture import known_contiguous
from ferrite.errors import Refusal
from ferrite.graph import fake_value, is_elementwise
from ferrite.ir import sum_pieces
from ferrite.passes.shared.facts import beside_torch
from ferrite.passes.shared.library import define
from ferrite.rewrite import Site, same_strides

aten = torch.ops.aten
MAX_NEIGHBOURS = 64  # nodes that are looked at for one convolution
TRANSPARENT = (  # what is computed as well on images whose channels lie side by side, besides pointwise operators
    operator.getitem,
    aten.cat.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.clone.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten.upsample_nearest2d.vec,
    aten.constant_pad_nd.default,
)

OVER_PLACES = (aten.mean.dim, aten.sum.dim_IntList)


# --- operators --------------------------------------------------------------------------------------------------------


@define("convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation) -> Tensor")
def convolution(
    x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """A convolution without a bias, whose result has its channels side by side. Where an image has more channels than a
    channel of the weight, these are in groups."""
    no_edges, groups = [0] * len(stride), x.shape[1] // weight.shape[1]
    found: torch.Tensor = aten.convolution.default(x, weight, None, stride, padding, dilation, False, no_edges, groups)
    return found.movedim(1, -1).contiguous().movedim(-1, 1)


@define(
    "convolution_of_panels(Tensor x, Tensor panels, int channels, int[] stride, int[] padding, int[] dilation)"
    " -> Tensor"
)
def convolution_of_panels(
    x: torch.Tensor, panels: torch.Tensor, channels: int, stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """The same with a weight that lies in panels, each of some channels of the result: tap by tap, and channel by
    channel of the image, with all of the panel side by side. Of the last panel only the first channels may count."""
    weight = panels.movedim(-1, 1).flatten(0, 1)[:channels].movedim(-1, 1)
    found: torch.Tensor = convolution(x, weight, stride, padding, dilation)
    return found


CONVOLUTIONS = (
    aten.convolution.default,
    torch.ops.ferrite.convolution.default,
    torch.ops.ferrite.convolution_of_panels.default,
)


def window_of(site: Site) -> list[list[int]]:
    """Steps, edges and distances of taps of a convolution, each for every dimension."""
    given = site.arguments
    n = fake_value(site.node).ndim - 2
    return [list(given[name]) * (n // len(given[name])) for name in ("stride", "padding", "dilation")]


def as_torch_has_it(site: Site, found: torch.fx.Node) -> Any:
    """The result of a convolution that was made for one of torch's: with its bias, and as it lies."""
    result, bias = fake_value(site.node), site.arguments["bias"]
    if bias is not None:
        bias = site.call(aten.reshape.default, bias, [result.shape[1], *[1] * (result.ndim - 2)])
        found = site.call(aten.add.Tensor, found, bias)
    if same_strides(fake_value(found), result):
        return found
    if not known_contiguous(result):
        return Refusal("its result lies neither by channels nor by places")
    return site.call(aten.clone.default, found, memory_format=torch.contiguous_format)


# --- decisions --------------------------------------------------------------------------------------------------------


def reason_against(site: Site, x: torch.Tensor, weight: torch.Tensor) -> Refusal | None:
    """Why a convolution cannot be a kernel of our own, as far as kernels go today."""
    given = site.arguments
    if x.device.type != "cpu" or x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        return Refusal("kernels of our own are there for convolutions of float32 and float64 on a cpu")
    if given["transposed"]:
        return Refusal("it is transposed")
    numbers = (*x.shape, *weight.shape, *given["stride"], *given["padding"], *given["dilation"])
    if not all(type(number) is int for number in numbers):
        return Refusal("its sizes are not known")
    if math.prod((*x.shape, *weight.shape, *fake_value(site.node).shape)) == 0:
        return Refusal("it has no elements, or sums of none")
    if min(given["padding"]) < 0:
        return Refusal("its edges are cut off")
    if not sum_pieces.windows_can_be_cut(weight.shape[1:]):
        return Refusal("its sums are short, or cannot be cut into equal pieces, and would round worse than torch's")
    if (
        x.ndim != weight.ndim
        or weight.shape[0] // given["groups"] < 2
        or math.prod((x.shape[0], *fake_value(site.node).shape[2:])) < 2
    ):
        return Refusal("it has a single channel, or a single place")
    return None


def reason_to_leave(site: Site, x: torch.Tensor, weight: torch.Tensor) -> Refusal | None:
    """Why a kernel of our own was not measured to be faster than torch's, if it was not: by the machine, where channels
    lie side by side. Images that lie otherwise are turned, which costs a convolution of one by one more than it gains,
    unless what comes before or after it has them side by side as well: windows, over several channels or of each
    alone."""
    if site.options.executor != "native" or x.dtype is not torch.float32:
        return Refusal("convolutions of our own are measured for float32 only")
    multiplications = fake_value(site.node).numel() * math.prod(weight.shape[1:])
    if (refusal := beside_torch().convolution(multiplications)) is not None:
        return refusal
    if any(user.op == "output" for user in site.arguments["input"].users):
        return Refusal("the image is given out as it is, and would be there twice")
    if site.arguments["groups"] != 1:
        return None
    alone = beside_torch().lone_convolution(math.prod(weight.shape[2:]))
    return alone if alone is not None and not has_windows_nearby(site.node) else None


def is_image(node: torch.fx.Node) -> bool:
    """Whether a node computes an image, or several results, and nothing that is spread over one."""
    value = fake_value(node)
    is_tensor = isinstance(value, torch.Tensor)
    return node.op == "call_function" and (not is_tensor or (value.ndim > 2 and math.prod(value.shape[2:]) > 1))


def has_windows_nearby(node: torch.fx.Node) -> bool:
    """Whether a convolution with a window is before or after one, and only what leaves images as they lie between."""
    seen, todo = {node}, [node]
    while todo and len(seen) < MAX_NEIGHBOURS:
        here = todo.pop(0)
        images = here.all_input_nodes[:1] if here.target in CONVOLUTIONS else here.all_input_nodes
        for other in (*images, *here.users):
            if other in seen or not is_image(other):
                continue
            seen.add(other)
            if (is_dense(other) and taps_of(other) > 1) or (is_depthwise(other) and not is_squeezed(other)):
                return True
            if is_dense(other) or other.target in TRANSPARENT or is_elementwise(other.target):
                todo.append(other)
    return False


def is_dense(node: torch.fx.Node) -> bool:
    """Whether it is a convolution over several channels."""
    return node.target in CONVOLUTIONS and not is_depthwise(node)


def is_depthwise(node: torch.fx.Node) -> bool:
    """Whether it is a convolution of each channel alone, whose loops have channels side by side where the image has."""
    return node.target is aten.convolution.default and bool(fake_value(node.all_input_nodes[1]).shape[1] == 1)


def is_squeezed(node: torch.fx.Node) -> bool:
    """Whether an image, or what elements of it become, is added up over its places, to weigh its channels. That is done
    as it is computed where places lie side by side, and else in a pass of its own: with convolutions of one by one of
    our own near windows of each channel alone, MobileNetV2 takes 0.81 of the time, EfficientNet 1.04."""
    seen, todo = {node}, [node]
    while todo and len(seen) < MAX_NEIGHBOURS:
        for user in todo.pop().users:
            if user.target in OVER_PLACES:
                return True
            if user not in seen and (is_elementwise(user.target) or user.target in TRANSPARENT):
                seen.add(user)
                todo.append(user)
    return False


def taps_of(node: torch.fx.Node) -> int:
    """Of the window of a convolution."""
    shape = fake_value(node.all_input_nodes[1]).shape
    return math.prod(shape[1:-2] if node.target is torch.ops.ferrite.convolution_of_panels.default else shape[2:])
