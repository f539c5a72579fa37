"""Attention that is a kernel of our own, not torch's: blocked with running maxima.

    _scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)[0]
                                                                =>      attention(q, k, v, mask, causal, scale)[0]

`torch.ops.ferrite.attention` is lowered to the operation that flex attention is, too. Where that was measured to pay is
a field of the machine (`ferrite.machines.beside_torch`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.machines import AttentionSizes, thread_counts
from ferrite.passes.shared.cases import normal
from ferrite.passes.shared.facts import beside_torch
from ferrite.passes.shared.library import define
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
MAX_WIDTH = 256  # of a head: a block has all of it in tiles
Tensor = torch.Tensor


@define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor)"
)
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The softmax of scaled products, times values, and the logarithm of each row's sum."""
    result: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return result


def owned(site: Site) -> Any:
    how = site.options.own_attention
    if how == "off":
        return Refusal("the option own_attention is off")
    given = [fake_value(site.arguments[name]) for name in ("query", "key", "value")]
    mask = site.arguments.get("attn_mask")
    needs_logarithm = any(user.args[1] == 1 and user.users for user in site.node.users)
    if (refusal := reason_against(given, mask, needs_logarithm)) is not None:
        return refusal
    if site.arguments.get("dropout_p", 0.0):
        return Refusal("it drops weights")
    is_causal, scale = site.arguments.get("is_causal", False), site.arguments.get("scale")
    query, key, _ = given
    if how == "auto":
        if site.options.executor != "native" or query.dtype is not torch.float32:
            return Refusal("attention of our own is measured for float32 only")
        few_threads = thread_counts.has_few_threads()
        sizes = AttentionSizes(query.shape[2], key.shape[2], query.shape[3], few_threads)
        if (refusal := beside_torch().attention(sizes)) is not None:
            return refusal
    operands = (site.arguments[name] for name in ("query", "key", "value"))
    return site.call(torch.ops.ferrite.attention.default, *operands, mask, is_causal, scale)


def reason_against(given: list[Tensor], mask: Any, needs_logarithm: bool) -> Refusal | None:
    """Why attention cannot be a kernel of our own."""
    query, key, value = given
    if any(each.device.type != "cpu" or each.dtype not in (torch.float32, *HALVES) for each in given):
        return Refusal("kernels of our own are there for attention of 16 and 32 bits on a cpu")
    shapes = [*query.shape, *key.shape, *value.shape]
    if not all(isinstance(size, int) for size in shapes):
        return Refusal("its sizes are not known")
    if math.prod(shapes) == 0:
        return Refusal("it has no elements, or nothing to attend to")
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return Refusal(f"a head has more than {MAX_WIDTH} elements")
    if mask is not None and needs_logarithm:
        return Refusal("torch's gradients with a mask want the logarithms of torch's kernel")
    return None


# --- what it fires on -------------------------------------------------------------------------------------------------


def plain(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0]


def causal(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True, scale=0.3)[0]


def with_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, attn_mask=mask)[0]


ALWAYS = {"own_attention": "always"}
QKV = ((2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8))
WIDE = ((1, 1, 4, 260),) * 3

OWN_ATTENTION = NodeRule(
    name="own_attention",
    purpose="attention becomes a kernel of our own",
    targets=(aten._scaled_dot_product_flash_attention_for_cpu.default,),
    rewrite=owned,
    numerics="rounded",
    examples=(
        Case("no mask", plain, normal(*QKV), ALWAYS),
        Case("causal", causal, normal(*QKV), ALWAYS),
        Case("a mask", with_mask, normal(*QKV, (2, 1, 7, 9)), ALWAYS),
        Case("a mask of two dimensions", with_mask, normal(*QKV, (7, 9)), ALWAYS),
        Case("heads share keys", plain, normal((2, 6, 7, 8), *QKV[1:]), ALWAYS),
        Case("half precision", plain, normal(*QKV, dtype=torch.bfloat16), ALWAYS),
    ),
    near_misses=(
        Case("switched off", plain, normal(*QKV), {"own_attention": "off"}),
        Case("not asked for, in 16 bits", plain, normal(*QKV, dtype=torch.bfloat16)),
        Case("double precision", plain, normal(*QKV, dtype=torch.float64), ALWAYS),
        Case("wide heads", plain, normal(*WIDE), ALWAYS),
    ),
)


@graph_pass(stage="post_grad", rules=(OWN_ATTENTION,))
def own_attention(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Attention for which a kernel of our own is faster than torch's."""
    return apply_rules(gm, (OWN_ATTENTION,), context)
