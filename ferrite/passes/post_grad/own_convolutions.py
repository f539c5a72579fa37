"""Convolutions that are kernels of our own, not torch's: loops like any others, with what follows them inside.

    convolution(x, w, b)        =>      clone(ferrite.convolution(x, w) + b, contiguous)

`torch.ops.ferrite.convolution` is lowered to a sum of products, which the scheduler arranges in tiles; pointwise
operators that read it become part of the kernel. Its result has the channels side by side, as its kernel reads and
writes them. The copy is no work of its own: what reads it reads the image either way. Whether all that pays is decided
here and nowhere else (`reason_to_leave`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ferrite.capture import known_contiguous, product_libraries
from ferrite.errors import Refusal
from ferrite.graph import fake_value, is_elementwise
from ferrite.passes.post_grad import operators as operators  # defines torch.ops.ferrite
from ferrite.passes.post_grad.convolutions import bare, conv
from ferrite.passes.shared.cases import whole_numbers as of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, same_strides

aten = torch.ops.aten
MIN_SUMMED, MAX_PIECE, MIN_PIECE = 16, 640, 128  # products of a sum; of a piece of one, which the scheduler cuts
MIN_WORK = 2**18  # multiplications
MAX_NEIGHBOURS = 64  # nodes that are looked at for one convolution
CONVOLUTIONS = (aten.convolution.default, torch.ops.ferrite.convolution.default)
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


def owned(site: Site) -> Any:
    given = site.arguments
    x, weight, result = site.value(given["input"]), site.value(given["weight"]), fake_value(site.node)
    if site.options.own_convolutions == "off":
        return Refusal("the option own_convolutions is off")
    if (refusal := reason_against(site, x, weight)) is not None:
        return refusal
    if site.options.own_convolutions == "auto" and (refusal := reason_to_leave(site, x, weight)) is not None:
        return refusal
    n = weight.ndim - 2
    window = [list(given[name]) * (n // len(given[name])) for name in ("stride", "padding", "dilation")]
    found = site.call(torch.ops.ferrite.convolution.default, given["input"], given["weight"], *window)
    if given["bias"] is not None:
        bias = site.call(aten.reshape.default, given["bias"], [weight.shape[0], *[1] * n])
        found = site.call(aten.add.Tensor, found, bias)
    if same_strides(fake_value(found), result):
        return found
    if not known_contiguous(result):
        return Refusal("its result lies neither by channels nor by places")
    return site.call(aten.clone.default, found, memory_format=torch.contiguous_format)


def reason_against(site: Site, x: torch.Tensor, weight: torch.Tensor) -> Refusal | None:
    """Why a convolution cannot be a kernel of our own, as far as kernels go today."""
    given = site.arguments
    if x.device.type != "cpu" or x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        return Refusal("kernels of our own are there for convolutions of float32 and float64 on a cpu")
    if given["transposed"] or given["groups"] != 1:
        return Refusal("it is transposed, or in groups")
    numbers = (*x.shape, *weight.shape, *given["stride"], *given["padding"], *given["dilation"])
    if not all(type(number) is int for number in numbers):
        return Refusal("its sizes are not known")
    if math.prod((*x.shape, *weight.shape, *fake_value(site.node).shape)) == 0:
        return Refusal("it has no elements, or sums of none")
    if min(given["padding"]) < 0:
        return Refusal("its edges are cut off")
    if not can_be_cut(weight.shape[1:]):
        return Refusal("its sums are short, or cannot be cut into equal pieces, and would round worse than torch's")
    if x.ndim != weight.ndim or weight.shape[0] < 2 or math.prod((x.shape[0], *fake_value(site.node).shape[2:])) < 2:
        return Refusal("it has a single channel, or a single place")
    return None


def can_be_cut(summed: Any) -> bool:
    """Whether the scheduler has equal pieces for such sums (`ferrite.ir.sum_pieces`)."""
    length, products = max(summed), math.prod(summed)
    others = products // length
    pieces = (size for size in range(1, length + 1) if length % size == 0)
    return products >= MIN_SUMMED and (
        products <= MAX_PIECE or any(MIN_PIECE <= size * others <= MAX_PIECE for size in pieces)
    )


def reason_to_leave(site: Site, x: torch.Tensor, weight: torch.Tensor) -> Refusal | None:
    """Why a kernel of our own was not measured to be faster than torch's, if it was not. On a Neoverse N1
    (`bench/results/convolutions-last-aarch64.md`) it takes 0.58 to 1.19 of the time where channels lie side by side,
    0.92 in the geometric mean; above 1.1 are small ones of one by one, which pay as nothing is turned for them.
    Images that lie otherwise are turned, which costs a convolution of one by one more than it gains, unless what comes
    before or after it has them side by side as well."""
    is_native = site.options.executor == "native"
    if not is_native or x.dtype is not torch.float32 or not product_libraries.uses_arm_compute_library():
        return Refusal("convolutions of our own are measured for float32 on Arm only")
    if any(user.op == "output" for user in site.arguments["input"].users):
        return Refusal("the image is given out as it is, and would be there twice")
    if fake_value(site.node).numel() * math.prod(weight.shape[1:]) < MIN_WORK:
        return Refusal("it is so small that all a kernel of our own can gain is the time of a call")
    if math.prod(weight.shape[2:]) == 1 and known_contiguous(x) and not has_windows_nearby(site.node):
        return Refusal("it is one by one, and no other convolution is near")
    return None


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
            if is_dense(other) and math.prod(fake_value(other.all_input_nodes[1]).shape[2:]) > 1:
                return True
            if is_dense(other) or other.target in TRANSPARENT or is_elementwise(other.target):
                todo.append(other)
    return False


def is_dense(node: torch.fx.Node) -> bool:
    """Whether it is a convolution over all channels. Between windows of each channel alone those of one by one are
    torch's: as ours they took 0.86 of the time in MobileNetV2, but 1.09 in EfficientNet, whose windows are larger."""
    return node.target in CONVOLUTIONS and bool(node.target is not aten.convolution.default or node.args[-1] == 1)


# --- what it fires on -------------------------------------------------------------------------------------------------

ALWAYS = {"own_convolutions": "always"}

OWN_CONVOLUTION = NodeRule(
    name="own_convolution",
    purpose="a convolution becomes loops, which are fused with what follows them",
    targets=(aten.convolution.default,),
    rewrite=owned,
    numerics="rounded",
    examples=(
        Case("three by three", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3)), ALWAYS),
        Case("a bias, every other place", conv(2, padding=1), of((2, 4, 7, 6), (6, 4, 3, 3), (6,)), ALWAYS),
        Case("taps apart", bare(dilation=2), of((1, 4, 9, 8), (6, 4, 3, 3)), ALWAYS),
        Case("one by one", bare(), of((2, 16, 3, 3), (6, 16, 1, 1)), ALWAYS),
        Case("channels side by side", bare(padding=1), of((2, 4, 6, 5), (6, 4, 3, 3), last=True), ALWAYS),
        Case("one dimension", bare(padding=2), of((2, 4, 9), (6, 4, 5)), ALWAYS),
        Case("three dimensions", bare(padding=1), of((1, 2, 4, 3, 5), (6, 2, 3, 3, 3)), ALWAYS),
        Case("double precision", bare(), of((1, 4, 6, 5), (6, 4, 3, 3), dtype=torch.float64), ALWAYS),
    ),
    near_misses=(
        Case("switched off", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3)), {"own_convolutions": "off"}),
        Case("tiny, where that decides", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3))),
        Case("half precision", bare(), of((1, 4, 6, 5), (6, 4, 3, 3), dtype=torch.bfloat16), ALWAYS),
        Case("groups", bare(padding=1, groups=2), of((1, 8, 6, 5), (6, 4, 3, 3)), ALWAYS),
        Case("transposed", bare(transposed=True), of((1, 4, 6, 5), (4, 6, 3, 3)), ALWAYS),
        Case("sums of few", bare(), of((1, 3, 6, 5), (6, 3, 2, 2)), ALWAYS),
        Case("many taps of a prime number", bare(), of((1, 1031, 4, 4), (2, 1031, 3, 3)), ALWAYS),
        Case("a single channel", bare(), of((1, 4, 6, 5), (1, 4, 3, 3)), ALWAYS),
        Case("a single place", bare(), of((1, 4, 3, 3), (6, 4, 3, 3)), ALWAYS),
    ),
)


@graph_pass(stage="post_grad", rules=(OWN_CONVOLUTION,))
def own_convolutions(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Convolutions for which our own kernels are faster than torch's: they hold what follows them, too."""
    return apply_rules(gm, (OWN_CONVOLUTION,), context)
