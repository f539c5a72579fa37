"""Constant factors of products that are kernels of our own, stored as these kernels read them.

    mm(x, W)            W: [768, 3072]      =>      product_of_panels(x, P, 3072)       P: [192, 768, 16]

A kernel multiplies some columns of a matrix at a time, step by step of all sums. Where that is how the matrix lies,
nothing is copied while the kernel runs. It is another copy of the weight beside the model's own, unless the option
freeze_discard_parameters lets that go; `weight_layouts="off"` keeps weights as they are. One weight is stored once,
however many graphs read it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ferrite.capture import on_real_tensors
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import host_machine
from ferrite.passes.freezing.binary_cases import constant, of
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.facts import transposed
from ferrite.passes.shared.own_products import OPERANDS, reason_against, reason_to_leave
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
MIN_ROWS = 2  # a single row is multiplied at the speed of memory, however the matrix lies
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
    if x.shape[0] < MIN_ROWS:
        return Refusal("it has a single row")
    if site.options.own_products == "auto" and (refusal := reason_to_leave(site, x, weight, in_panels=True)):
        return refusal
    assert site.constant is not None
    panels = site.constant(NAME, panels_of(weight))
    site.through(*([right] if right.op != "get_attr" else []))
    made = site.call(torch.ops.ferrite.product_of_panels.default, left, panels, weight.shape[1])
    bias = site.arguments.get("self") if "beta" in site.arguments else None
    return made if bias is None else site.call(aten.add.Tensor, made, bias)


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
    """The panels of a matrix: those that another graph has, if these have the same contents."""
    width = host_machine().panel_columns(weight.dtype)
    key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), width)
    with on_real_tensors(), _lock:
        found = _kept.get(key)
        if found is None or not has_contents(found, weight):
            found = _kept[key] = packed(weight, width)
        return found


def packed(weight: torch.Tensor, width: int) -> torch.Tensor:
    inner, columns = weight.shape
    panels = weight.new_zeros((-(-columns // width), inner, width))
    whole, rest = divmod(columns, width)
    panels[:whole].copy_(weight[:, : whole * width].unflatten(1, (whole, width)).permute(1, 0, 2))
    if rest:
        panels[whole, :, :rest].copy_(weight[:, whole * width :])
    return panels


def has_contents(panels: torch.Tensor, weight: torch.Tensor) -> bool:
    """Memory at one address may have been another weight's, or have been written since."""
    width, (whole, rest) = panels.shape[2], divmod(weight.shape[1], panels.shape[2])
    same = torch.equal(panels[:whole].permute(1, 0, 2), weight[:, : whole * width].unflatten(1, (whole, width)))
    return same and (not rest or torch.equal(panels[whole, :, :rest], weight[:, whole * width :]))


# --- what it fires on -------------------------------------------------------------------------------------------------

ALWAYS = {"own_products": "always"}


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


@graph_pass(stage="freeze", rules=(WEIGHTS_IN_PANELS,))
def store_weights_in_panels(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Weights of products of our own lie as kernels read them; how many bytes these copies have is counted."""
    count = apply_rules(gm, (WEIGHTS_IN_PANELS,), context)
    buffers = gm.named_buffers(recurse=False)
    context.facts["bytes in panels"] += sum(each.nbytes for name, each in buffers if name.startswith(f"_{NAME}"))
    return count
