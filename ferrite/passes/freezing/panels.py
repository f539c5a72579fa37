"""Constant factors of products and convolutions that are kernels of our own, stored as these kernels read them.

    mm(x, W)            W: [768, 3072]          =>      product_of_panels(x, P, 3072)           P: [192, 768, 16]
    _int_mm(x, W)       W: [768, 3072], bytes   =>      byte_product_of_panels(x, P, 3072)      P: [192, 192, 16, 4]
    convolution(x, W)   W: [512, 256, 3, 3]     =>      convolution_of_panels(x, P, 512)        P: [32, 3, 3, 256, 16]

A kernel multiplies some columns of a matrix, or channels of a result, at a time, step by step of all sums. Where that
is how the weight lies, nothing is copied while the kernel runs. It is another copy of the weight beside the model's
own, unless the option freeze_discard_parameters lets that go; `weight_layouts="off"` keeps weights as they are. One
weight is stored once, however many graphs read it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import host_machine
from ferrite.passes.freezing.binary_cases import constant, conv, of
from ferrite.passes.shared import byte_products
from ferrite.passes.shared.byte_products import WORD_BYTES
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.facts import transposed
from ferrite.passes.shared.own_convolutions import as_torch_has_it, window_of
from ferrite.passes.shared.own_convolutions import reason_against as reason_against_convolution
from ferrite.passes.shared.own_convolutions import reason_to_leave as reason_to_leave_convolution
from ferrite.passes.shared.own_products import OPERANDS, reason_against, reason_to_leave, with_bias
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
NAME = "weight_in_panels"


def in_panels(site: Site) -> Any:
    left, right = (site.arguments[name] for name in OPERANDS[site.node.target])
    weight = constant_matrix(right)
    if weight is None:
        return Refusal("the matrix is not constant")
    if "off" in (site.options.own_products, site.options.weight_layouts):
        return Refusal("the option own_products or weight_layouts is off")
    x = fake_value(left)
    if (refusal := reason_against(site, x, weight)) is not None:
        return refusal
    if torch_api.size_hint(x.shape[0]) < host_machine().min_layout_rows:
        return Refusal("it has a single row")
    if site.options.own_products == "auto" and (refusal := reason_to_leave(site, x, weight, in_panels=True)):
        return refusal
    assert site.constant is not None
    panels = site.constant(NAME, panels_of(weight))
    site.through(*([right] if right.op != "get_attr" else []))
    return with_bias(site, site.call(torch.ops.ferrite.product_of_panels.default, left, panels, weight.shape[1]))


def bytes_in_panels(site: Site) -> Any:
    left, right = site.arguments["self"], site.arguments["mat2"]
    weight = constant_matrix(right)
    if weight is None:
        return Refusal("the matrix is not constant")
    if site.options.weight_layouts == "off":
        return Refusal("the option weight_layouts is off")
    x = fake_value(left)
    if (refusal := byte_products.reason_against(site, x, weight)) is not None:
        return refusal
    if torch_api.size_hint(x.shape[0]) < host_machine().min_layout_rows:
        return Refusal("it has a single row")
    if refusal := byte_products.reason_to_leave(site, x, weight, in_panels=True):
        return refusal
    assert site.constant is not None
    inner, columns = weight.shape
    panels = site.constant(NAME, panels_of_words(weight))
    site.through(*([right] if right.op != "get_attr" else []))
    left = byte_products.in_words(site, left, 1, inner)
    return site.call(torch.ops.ferrite.byte_product_of_panels.default, left, panels, columns)


def in_panels_of_channels(site: Site) -> Any:
    image, item = (site.arguments[name] for name in ("input", "weight"))
    weight = constant_of(item)
    if weight is None:
        return Refusal("the weight is not constant")
    if "off" in (site.options.own_convolutions, site.options.weight_layouts):
        return Refusal("the option own_convolutions or weight_layouts is off")
    x, result = fake_value(image), fake_value(site.node)
    if (refusal := reason_against_convolution(site, x, weight)) is not None:
        return refusal
    if site.arguments["groups"] != 1:
        return Refusal("a panel would have channels of several groups")
    if weight[0, 0].numel() == 1 and sum(size > 1 for size in (x.shape[0], *result.shape[2:])) < 2:
        return Refusal("it is a matrix product")
    if site.options.own_convolutions == "auto" and (refusal := reason_to_leave_convolution(site, x, weight)):
        return refusal
    assert site.constant is not None
    with on_real_tensors():
        by_taps = weight.movedim((1, 0), (-2, -1))
    operator = torch.ops.ferrite.convolution_of_panels.default
    panels = site.constant(NAME, panels_of(by_taps))
    return as_torch_has_it(site, site.call(operator, image, panels, weight.shape[0], *window_of(site)))


def constant_matrix(item: Any) -> torch.Tensor | None:
    """A constant, or the transpose of one."""
    if not isinstance(item, torch.fx.Node):
        return None
    source = transposed(item)
    found = constant_of(item if source is None else source)
    if found is None:
        return None
    with on_real_tensors():
        return found if source is None else found.t()


# --- one copy for all graphs ------------------------------------------------------------------------------------------

_kept: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """The panels of a weight, whose columns come last: those that another graph has, if their contents are the same."""
    width = host_machine().panel_columns(weight.dtype)
    key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), width)
    with on_real_tensors(), _lock:
        found = _kept.get(key)
        if found is None or not has_contents(found, weight):
            found = _kept[key] = packed(weight, width)
        return found


def panels_of_words(weight: torch.Tensor) -> torch.Tensor:
    """The same of a matrix of bytes: four steps of a sum are a word, and lie side by side. On machines that multiply
    bytes without a sign, with 128 added to each."""
    machine = host_machine()
    width = machine.panel_columns(torch.int32)
    key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), width)
    with on_real_tensors(), _lock:
        inner, _ = weight.shape
        words = torch.nn.functional.pad(weight, [0, 0, 0, -inner % WORD_BYTES]).unflatten(0, (-1, WORD_BYTES))
        if machine.unsigned_bytes:
            words = words.bitwise_xor(-128).view(torch.uint8)
        found = _kept.get(key)
        if found is None or not has_contents(found.transpose(-1, -2), words):
            panels = packed(words, width)
            found = _kept[key] = panels.transpose(-1, -2).contiguous()
        return found


def packed(weight: torch.Tensor, width: int) -> torch.Tensor:
    *steps, columns = weight.shape
    panels = weight.new_zeros((-(-columns // width), *steps, width))
    for ours, theirs in in_whole_and_last(panels, weight):
        ours.copy_(theirs)
    return panels


def has_contents(panels: torch.Tensor, weight: torch.Tensor) -> bool:
    """Memory at one address may have been another weight's, or have been written since."""
    return all(torch.equal(ours, theirs) for ours, theirs in in_whole_and_last(panels, weight))


def in_whole_and_last(panels: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is the same: the whole panels and their columns, and the last panel, of which a part counts."""
    width = panels.shape[-1]
    whole, rest = divmod(weight.shape[-1], width)
    if whole:
        yield panels[:whole], weight[..., : whole * width].unflatten(-1, (whole, width)).movedim(-2, 0)
    if rest:
        yield panels[whole, ..., :rest], weight[..., whole * width :]


# --- what it fires on -------------------------------------------------------------------------------------------------

ALWAYS = {"own_products": "always", "own_convolutions": "always"}
IMAGE = of((2, 4, 6, 5))


def bytes_of(*shape: int) -> torch.Tensor:
    return constant(*shape, dtype=torch.int8, start=-9, step=3)


def given_bytes(*shapes: tuple[int, ...]) -> Any:
    return lambda: [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]


def byte_linear(x: Any) -> Any:
    return aten._int_mm.default(x, bytes_of(18, 32).t())


def byte_matrix(inner: int) -> Any:
    return lambda x: aten._int_mm.default(x, bytes_of(inner, 18))


def linear(x: Any) -> Any:
    return aten.addmm.default(constant(18), x, constant(18, 32).t())


WEIGHTS_IN_PANELS = NodeRule(
    name="weights_in_panels",
    purpose="a constant factor of a product of our own is stored as its kernel reads it",
    targets=(aten.mm.default, aten.addmm.default),
    rewrite=in_panels,
    numerics="rounded",
    examples=(
        Case("a linear layer", linear, of((5, 32)), ALWAYS),
        Case("a matrix by rows", lambda x: aten.mm.default(x, constant(32, 48)), of((5, 32)), ALWAYS),
    ),
    near_misses=(
        Case("it does not pay", linear, of((5, 32))),
        Case("layouts are kept", linear, of((5, 32)), {**ALWAYS, "weight_layouts": "off"}),
        Case("a single row", linear, of((1, 32)), ALWAYS),
        Case("the matrix is an input", lambda x, w: aten.mm.default(x, w), of((5, 32), (32, 48)), ALWAYS),
        Case("the left is constant", lambda x: aten.mm.default(constant(4, 32), x), of((32, 5)), ALWAYS),
    ),
)


CHANNELS_IN_PANELS = NodeRule(
    name="channels_in_panels",
    purpose="a constant weight of a convolution of our own is stored as its kernel reads it",
    targets=(aten.convolution.default,),
    rewrite=in_panels_of_channels,
    numerics="rounded",
    examples=(
        Case("three by three", lambda x: conv(x, constant(6, 4, 3, 3)), IMAGE, ALWAYS),
        Case("with a bias", lambda x: conv(x, constant(18, 4, 3, 2), constant(18)), IMAGE, ALWAYS),
        Case("one by one", lambda x: conv(x, constant(6, 16, 1, 1)), of((2, 16, 3, 3)), ALWAYS),
        Case("one dimension", lambda x: conv(x, constant(6, 4, 5)), of((2, 4, 9)), ALWAYS),
    ),
    near_misses=(
        Case("it does not pay", lambda x: conv(x, constant(6, 4, 3, 3)), IMAGE),
        Case("switched off", lambda x: conv(x, constant(6, 4, 3, 3)), IMAGE, {"own_convolutions": "off"}),
        Case("layouts are kept", lambda x: conv(x, constant(6, 4, 3, 3)), IMAGE, {**ALWAYS, "weight_layouts": "off"}),
        Case("the weight is an input", lambda x, w: conv(x, w), of((2, 4, 6, 5), (6, 4, 3, 3)), ALWAYS),
        Case("groups", lambda x: conv(x, constant(6, 2, 3, 3), groups=2), IMAGE, ALWAYS),
        Case("a matrix product", lambda x: conv(x, constant(6, 16, 1)), of((1, 16, 9)), ALWAYS),
    ),
)
BYTES_IN_PANELS = NodeRule(
    name="bytes_in_panels",
    purpose="a constant factor of a product of bytes of our own is stored as its kernel reads it",
    targets=(aten._int_mm.default,),
    rewrite=bytes_in_panels,
    examples=(
        Case("a linear layer", byte_linear, given_bytes((5, 32)), ALWAYS),
        Case("a matrix by rows", byte_matrix(32), given_bytes((5, 32)), ALWAYS),
        Case("sums that are no multiple of four long", byte_matrix(33), given_bytes((5, 33)), ALWAYS),
    ),
    near_misses=(
        Case("it does not pay", byte_linear, given_bytes((5, 32))),
        Case("layouts are kept", byte_linear, given_bytes((5, 32)), {**ALWAYS, "weight_layouts": "off"}),
        Case("a single row", byte_linear, given_bytes((1, 32)), ALWAYS),
        Case("the matrix is an input", aten._int_mm.default, given_bytes((5, 32), (32, 18)), ALWAYS),
    ),
)
PANEL_RULES = (WEIGHTS_IN_PANELS, BYTES_IN_PANELS, CHANNELS_IN_PANELS)


@graph_pass(stage="freeze", rules=PANEL_RULES)
def store_weights_in_panels(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Weights of products and convolutions of our own lie as kernels read them; how many bytes these copies have is
    counted."""
    count = apply_rules(gm, PANEL_RULES, context)
    buffers = gm.named_buffers(recurse=False)
    context.facts["bytes in panels"] += sum(each.nbytes for name, each in buffers if name.startswith(f"_{NAME}"))
    return count
