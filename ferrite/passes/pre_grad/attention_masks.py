"""Attention masks that hide nothing, and those that hide what comes later.

    mask = (arange(n) >= 0).expand(b, 1, n, n)
    scaled_dot_product_attention(q, k, v, attn_mask=mask)      =>      scaled_dot_product_attention(q, k, v)

    mask = arange(n)[:, None] >= arange(n)
    scaled_dot_product_attention(q, k, v, attn_mask=mask)      =>      the same with is_causal=True, and no mask

Libraries drop such a mask by looking at it, which they cannot while a graph is captured. With any mask most kernels of
GPUs are out of the question, and attention becomes products and a softmax in float32: twice the time of a whole vision
transformer. Only masks made of constants are looked at: by the bounds of their elements (see `value_bounds`), or by the
elements themselves (see `constant_values`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.capture import on_real_tensors, product_libraries, torch_api
from ferrite.errors import Refusal
from ferrite.passes.pre_grad.constant_values import ConstantTensors
from ferrite.passes.pre_grad.predicates import is_plain
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.pre_grad.value_bounds import FALSE, TRUE, ValueBounds
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def without_mask(site: Site) -> Any:
    if (problem := problem_of(site)) is not None:
        return problem
    given = site.arguments
    mask = given["attn_mask"]
    hides_nothing = TRUE if site.value(mask).dtype is torch.bool else FALSE
    if ValueBounds(site.written).of(mask) != hides_nothing:
        return Refusal(f"{mask.name} is not known to hide nothing")
    kept = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    return site.call(site.node.target, given["query"], given["key"], given["value"], **kept)


def causal(site: Site) -> Any:
    if (problem := problem_of(site)) is not None:
        return problem
    given = site.arguments
    mask, sizes = given["attn_mask"], [site.value(given[name]).shape[-2] for name in ("query", "key")]
    if site.value(mask).dtype is not torch.bool:
        return Refusal("the mask is a bias")
    if not all(type(size) is int for size in sizes) or site.value(mask).shape[-2:] != tuple(sizes):
        return Refusal("it is not known to have an element for each query and key")
    if sizes[0] != sizes[1]:
        return Refusal("there are more keys than queries, or fewer")
    if (is_lower_triangle, mask) not in site.answers:  # all layers have the same mask
        site.answers[is_lower_triangle, mask] = is_lower_triangle(ConstantTensors(site.written).of(mask))
    if not site.answers[is_lower_triangle, mask]:
        return Refusal(f"{mask.name} is not known to hide what comes later, and nothing else")
    kept = {"is_causal": True, "scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    return site.call(site.node.target, given["query"], given["key"], given["value"], **kept)


def is_lower_triangle(value: torch.Tensor | None) -> bool:
    if value is None:
        return False
    with on_real_tensors():
        wanted = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
        return torch.equal(value, wanted.expand_as(value))


def problem_of(site: Site) -> Refusal | None:
    """Why attention may not have another mask, whatever it hides."""
    given = site.arguments
    mask = given["attn_mask"]
    if not isinstance(mask, torch.fx.Node):
        return Refusal("it has no mask")
    tensors = [site.value(given[name]) for name in ("query", "key", "value")]
    if not all(map(is_plain, (*tensors, site.value(mask)))):
        return Refusal("it is not given ordinary tensors")
    if given["is_causal"] is not False:
        return Refusal("eager takes no mask where attention is causal")
    if not isinstance(given["dropout_p"], (int, float)) or given["dropout_p"] != 0:
        return Refusal("another kernel would drop other weights")
    if not all(torch_api.known_true(size >= 1) for tensor in tensors for size in tensor.shape):
        return Refusal("it may be empty")
    in_float32_on_cuda = tensors[0].device.type == "cuda" and tensors[0].dtype is torch.float32
    if in_float32_on_cuda and not product_libraries.may_round_operands("cuda"):
        return Refusal("attention may round to TF32 there, which products may not")
    return None


# --- what it fires on -------------------------------------------------------------------------------------------------


def attention(label: str, make_mask: Callable[..., Any], *sizes: tuple[int, ...], **named: Any) -> Case:
    """Attention of queries with themselves, and a mask that is made from them."""

    def function(q: Any, *inputs: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q, make_mask(q, *inputs), **named) + 1

    return Case(label, function, lambda: [torch.randn(size) for size in sizes or ((2, 3, 5, 4),)])


def by_name(q: Any) -> Any:
    mask = torch.ones((q.shape[-2], q.shape[-2]), dtype=torch.bool)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.5) + 1


def rows_from_zero(q: Any) -> Any:
    rows = torch.arange(q.shape[-2], device=q.device)[None, None, :, None]
    return (rows >= 0).expand(q.shape[0], -1, -1, q.shape[-2])


def within_length(q: Any) -> Any:
    places = torch.arange(1, q.shape[-2] + 1)
    return (places[:, None] <= q.shape[-2]) & ((places > 0) | (places[:, None] > places))


def hidden_nowhere(q: Any) -> Any:
    mask = torch.zeros((q.shape[-2], q.shape[-2]), dtype=torch.bool)
    return q.new_zeros(mask.shape).masked_fill(mask, float("-inf"))


def as_a_bias(q: Any) -> Any:
    return (1.0 - torch.ones((q.shape[0], 1, 1, q.shape[-2]))) * torch.finfo(torch.float32).min


def chosen(q: Any) -> Any:
    seen = torch.full((q.shape[-2], 1), True)
    return torch.where(seen, 0.0, float("-inf")).expand(-1, q.shape[-2])


def written_mask(q: Any) -> Any:
    mask = torch.ones((q.shape[-2], q.shape[-2]), dtype=torch.bool)
    mask[0, 1] = False
    return mask


def one_hidden(q: Any) -> Any:
    return torch.arange(q.shape[-2]).expand(q.shape[-2], -1) >= 1


def below_zero(q: Any) -> Any:
    return torch.arange(q.shape[-2], dtype=torch.uint8).expand(q.shape[-2], -1) >= -1


def earlier_keys(q: Any) -> Any:
    places = torch.arange(q.shape[-2], device=q.device)
    return (places[None, :] <= places[:, None])[None, None].expand(q.shape[0], -1, -1, -1)


def of_one_text(q: Any) -> Any:
    """As a library makes it that packs several texts into one: they begin where places do not go on."""
    places = torch.arange(q.shape[-2]).expand(q.shape[0], -1)
    texts = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, rows = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[-2])
    queries, keys = rows[None, None, :, None], rows[None, None, None, :]
    alike = texts[batch, queries] == texts[batch, keys]
    return (queries.new_ones((), dtype=torch.bool) & (keys <= queries)) & alike


def of_two_texts(q: Any) -> Any:
    text = torch.arange(q.shape[-2]) // 3
    return earlier_keys(q) & (text == text[:, None])


def window(q: Any) -> Any:
    places = torch.arange(q.shape[-2])
    return (places <= places[:, None]) & (places > places[:, None] - 3)


def with_fewer_queries(q: Any) -> Any:
    mask = torch.ones(2, q.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q[:, :, :2], q, q, mask) + 1


ATTENTION_MASKS = (
    NodeRule(
        name="mask_of_nothing",
        purpose="an attention mask that hides nothing is none",
        targets=(aten.scaled_dot_product_attention.default,),
        rewrite=without_mask,
        layout="free",
        numerics="rounded",
        examples=(
            attention("rows from 0 on", rows_from_zero),
            attention("within the length", within_length),
            Case("ones, by name", by_name, lambda: [torch.randn(2, 3, 5, 4)]),
            attention("minus infinity nowhere", hidden_nowhere),
            attention("a bias of zeros", as_a_bias),
            attention("chosen", chosen),
            attention("a scale of 0", rows_from_zero, scale=0.0),
        ),
        near_misses=(
            attention("one is hidden", one_hidden),
            attention("written", written_mask),
            attention("below the diagonal", lambda q: torch.ones(5, 5, dtype=torch.bool).tril()),
            attention("an input", lambda q, mask: mask > -1e9, (2, 3, 5, 4), (5, 5)),
            attention("wraps around", below_zero),
            attention("a bias of ones", lambda q: torch.ones(5, 5)),
            attention("no keys", lambda q: q.new_ones((0, 0), dtype=torch.bool), (2, 3, 0, 4)),
        ),
    ),
    NodeRule(
        name="causal_mask",
        purpose="an attention mask that hides what comes later, and nothing else, is said by a flag",
        targets=(aten.scaled_dot_product_attention.default,),
        rewrite=causal,
        layout="free",
        numerics="rounded",
        examples=(
            attention("earlier keys", earlier_keys),
            attention("the lower triangle", lambda q: torch.ones(5, 5, dtype=torch.bool).tril()),
            attention("of one text", of_one_text),
            attention("a scale", earlier_keys, scale=0.3),
        ),
        near_misses=(
            attention("of two texts", of_two_texts),
            attention("a window", window),
            attention("no diagonal", lambda q: torch.ones(5, 5, dtype=torch.bool).tril(-1)),
            attention("a bias", lambda q: torch.zeros(5, 5).masked_fill(~earlier_keys(q)[0, 0], -1.0)),
            attention("a mask for each key", lambda q: torch.arange(5)[None] <= 3),
            Case("fewer queries", with_fewer_queries, lambda: [torch.randn(2, 3, 5, 4)]),
            attention("of an input", lambda q, x: (x > 0).tril(), (2, 3, 5, 4), (5, 5)),
            attention("dropped", earlier_keys, dropout_p=0.5),
        ),
    ),
)


@pre_grad_pass(rules=ATTENTION_MASKS)
def drop_attention_masks(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Attention masks made of constants that hide nothing, or what comes later, are left out of the call."""
    return apply_rules(gm, ATTENTION_MASKS, context)
