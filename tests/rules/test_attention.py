"""Attention written out, in every spelling of the tables: one call is left, and it computes what eager does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.options import Options
from ferrite.passes.pre_grad.metadata import add_values
from ferrite.passes.shared.attention import BEFORE_AUTOGRAD, FOR_INFERENCE, find
from ferrite.passes.shared.attention.bias import LOWEST
from ferrite.passes.shared.attention.cases import heads, rows, three, tokens
from ferrite.passes.shared.attention.found import Add
from ferrite.passes.shared.attention.spellings import SCORES, AttentionSpelling, SpellingTable
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from ferrite.rewrite.arguments import arguments_of
from tests.attention_graphs import HALVES, SDPA, Function, assert_fused, masks, multi_query, out, scores_of
from tests.torch_level import canonical, captured

aten = torch.ops.aten

# --- spellings --------------------------------------------------------------------------------------------------------


def repeated(q: Any, k: Any, v: Any) -> Any:
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, 1)
    return multi_query(q, k, v)


def permuted_inside(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    return multi_query(q / math.sqrt(4), k, v)


def transposed_keys(q: Any, k: Any, v: Any) -> Any:
    q, v = (x.permute(0, 2, 1, 3) for x in (q, v))
    return out((q @ k.permute(0, 2, 3, 1)).softmax(3) @ v)


def by_einsum(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("b i h d, b j h d -> b h i j", q, k) * 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).contiguous()


def with_baddbmm(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (x.reshape(6, 5, 4) for x in (q, k, v))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.5)
    return torch.bmm(scores.view(2, 3, 5, 5).softmax(-1).view(6, 5, 5), v).view(2, 3, 5, 4)


def chunked_heads(x: Any) -> Any:
    """One projection, split in three."""
    q, k, v = x.view(2, 5, 3, 12).transpose(1, 2).chunk(3, dim=-1)
    return multi_query(q, k, v)


def square_roots(q: Any, k: Any, v: Any) -> Any:
    """The scale in halves, on queries and keys, as attention itself is taken apart."""
    root = math.sqrt(0.5)
    return out(torch.softmax((q * root) @ (k.transpose(-2, -1) * root), dim=-1) @ v)


def safe(q: Any, k: Any, v: Any) -> Any:
    """As attention itself is taken apart: rows without any weight are zeros."""
    scores = q * math.sqrt(0.5) @ (k.transpose(-2, -1) * math.sqrt(0.5))
    return out(aten._safe_softmax.default(scores, -1) @ v)


def five_dimensions(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1) @ v


def projections() -> list[Any]:
    return [torch.randn(2, 5, 3, 4) for _ in range(3)]


SPELLINGS: dict[str, tuple[Function, Callable[[], list[Any]]]] = {
    "one head of keys, by broadcasting": (multi_query, lambda: [heads(), heads(2, 5, 1, 4), heads(2, 5, 1, 4)]),
    "repeated heads": (repeated, lambda: [heads(2, 5, 6, 4), heads(2, 5, 2, 4), heads(2, 5, 2, 4)]),
    "permuted inside": (permuted_inside, projections),
    "keys transposed by one permutation": (transposed_keys, projections),
    "einsum": (by_einsum, projections),
    "baddbmm": (with_baddbmm, lambda: [*three(), torch.randn(6, 5, 5)]),
    "one projection": (chunked_heads, lambda: [torch.randn(2, 5, 36)]),
    "a scale in halves": (square_roots, three),
    "a safe softmax": (safe, three),
    "another number of keys": (multi_query, lambda: [heads(), heads(2, 7, 3, 4), heads(2, 7, 3, 4)]),
    "batch 1": (multi_query, lambda: [heads(1, 5, 3, 4) for _ in range(3)]),
    "one query": (multi_query, lambda: [heads(2, 1, 3, 4), heads(), heads()]),
    "large scores": (multi_query, lambda: [heads() * 300, heads() * 300, heads()]),
    "double precision": (multi_query, lambda: three(torch.float64)),
    "five dimensions": (five_dimensions, lambda: [torch.randn(2, 3, 2, 5, 4) for _ in range(3)]),
}


@pytest.mark.parametrize("label", SPELLINGS)
def test_every_spelling_becomes_one_call(label):
    assert_fused(*SPELLINGS[label])


@pytest.mark.quick
@pytest.mark.parametrize(
    "label", sorted(SPELLINGS.keys() - {"einsum"})
)  # which is in parts there, with one more dimension
def test_every_spelling_becomes_one_call_in_aten(label):
    assert_fused(*SPELLINGS[label], "aten")


@pytest.mark.quick
@pytest.mark.parametrize("label", sorted(SPELLINGS.keys() - {"einsum"}))
def test_arguments_may_be_passed_by_name(label):
    fn, make_inputs = SPELLINGS[label]
    gm = make_fx(fn, tracing_mode="fake")(*make_inputs())
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.args, node.kwargs = (), arguments_of(node)
    context = PassContext(Options(), is_inference=True)
    apply_rules(gm, FOR_INFERENCE, context)
    assert context.rewrites == {"sfdp_inference": 1}


@pytest.mark.quick
def test_a_new_spelling_is_one_more_pair(monkeypatch):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out(aten.rsub.Tensor(mask, scores_of(q, k)).softmax(-1) @ v)

    inputs = [*(each.detach() for each in three()), torch.randn(5, 5)]
    gm = torch.fx.symbolic_trace(fn)
    add_values(gm, inputs)
    canonical(gm)
    context = PassContext(Options(), is_inference=True)
    assert apply_rules(gm, BEFORE_AUTOGRAD, context) == 0
    pair = AttentionSpelling(lambda x, m: aten.rsub.Tensor(m, x), lambda m: Add(m, times=-1))
    monkeypatch.setattr(find, "SCORES", SpellingTable(*SCORES.spellings, pair, casts=SCORES.casts))
    apply_rules(gm, BEFORE_AUTOGRAD, context)
    assert context.rewrites == {"sfdp": 1}
    torch.testing.assert_close(gm(*inputs), fn(*inputs))


def tiled(q: Any, k: Any, v: Any) -> Any:
    """Heads 0 1 0 1 0 1, not 0 0 0 1 1 1."""
    return multi_query(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))


def mixed(q: Any, k: Any, v: Any) -> Any:
    return multi_query(q, k.repeat_interleave(3, 1), v.repeat(1, 3, 1, 1))


@pytest.mark.quick
@pytest.mark.parametrize(("fn", "grouped"), [(repeated, True), (tiled, False), (mixed, False)])
def test_heads_in_groups_are_not_written_out(fn, grouped):
    inputs = [heads(2, 5, 6, 4), heads(2, 5, 2, 4), heads(2, 5, 2, 4)]
    gm = captured(fn, inputs).gm
    assert apply_rules(gm, BEFORE_AUTOGRAD, PassContext(Options(), is_inference=True)) == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=SDPA)
    assert call.kwargs.get("enable_gqa", False) is grouped
    assert_fused(fn, lambda: inputs)


CHANGES: dict[str, Function] = {
    "scale": lambda s, m, t: s * 0.5,
    "tensor scale": lambda s, m, t: s / torch.full([], 2.0),
    "mask": lambda s, m, t: s + m,
    "fill": lambda s, m, t: s.masked_fill(t == 0, -math.inf),
    "where": lambda s, m, t: torch.where(t != 0, s, LOWEST),
}


def orders() -> list[Any]:
    """All of them in the long sweeps, every fifth otherwise: each change comes first, in between and last in some."""
    found = list(itertools.permutations(CHANGES, 3))
    return [
        pytest.param(order, id="-".join(order), marks=[pytest.mark.slow] if place % 5 else [])
        for place, order in enumerate(found)
    ]


@pytest.mark.parametrize("level", ["traced", "aten"])
@pytest.mark.parametrize("order", orders())
def test_what_happens_to_the_scores_happens_in_any_order(order, level):
    def fn(q: Any, k: Any, v: Any, mask: Any, tokens: Any) -> Any:
        scores = q @ k.transpose(2, 3)
        for name in order:
            scores = CHANGES[name](scores, mask, tokens[:, None, None])
        return out(scores.softmax(-1) @ v)

    assert_fused(fn, lambda: [*three(), torch.randn(2, 1, 5, 5), tokens()], level)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["traced", "aten"])
@pytest.mark.parametrize("name", masks())
def test_a_mask_that_nobody_knows_keeps_eagers_rows(name, level):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((q @ k.mT / 2 + mask).softmax(-1) @ v)

    assert_fused(fn, lambda: [*three(), masks()[name]], level)


@pytest.mark.parametrize("level", ["torch", "aten"])
def test_a_safe_softmax_keeps_its_zeros(level):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out(aten._safe_softmax.default(scores_of(q, k) / 2 + mask, -1) @ v)

    assert_fused(fn, lambda: [*three(), torch.zeros(5, 5).masked_fill(rows(), -math.inf)], level)


@torch.no_grad()
def test_keys_and_values_may_be_wanted_too():
    """As a model that keeps them for the next token does."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        return out((scores_of(q, k) / 2).softmax(-1) @ v), k, v

    inputs = projections()
    found = captured(fn, inputs)
    assert apply_rules(found.gm, BEFORE_AUTOGRAD, PassContext(Options(), is_inference=True)) == 1
    for ours, eager in zip(found.gm(*found.arrange(inputs)), fn(*inputs), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)


def test_two_masks_that_hide_a_row_together():
    def fn(q: Any, k: Any, v: Any, one: Any, other: Any) -> Any:
        return out((q @ k.mT + one + other).softmax(-1) @ v)

    left = torch.zeros(5, 5)
    left[2, :3] = -math.inf
    right = torch.zeros(2, 1, 1, 5)
    right[1, ..., 2:] = -math.inf
    assert_fused(fn, lambda: [*three(), left, right])


@pytest.mark.parametrize("value", [-math.inf, "lowest"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["torch", "aten"])
def test_half_precision_with_hidden_rows(dtype, value, level):
    number = torch.finfo(dtype).min if value == "lowest" else value

    def fn(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(hidden, number)
        return out(scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v)

    assert_fused(fn, lambda: [*three(dtype), rows()], level)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_cast_up_before_the_product(dtype):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = q.float() @ k.float().transpose(2, 3) / 2 + mask
        return out(scores.softmax(-1).to(v.dtype) @ v)

    assert_fused(fn, lambda: [*three(dtype), torch.randn(5, 5)])
    assert_fused(fn, lambda: [*three(dtype), torch.randn(5, 5).to(dtype)])


def mask_in_place(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    mask = torch.zeros(5, 5)
    mask.masked_fill_(hidden, -math.inf)
    return out((scores_of(q, k) + mask).softmax(-1) @ v)


def row_in_place(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    mask = torch.zeros(5, 5)
    mask[2].fill_(-math.inf)
    return out((scores_of(q, k) + mask).softmax(-1) @ v)


def scale_in_place(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    scale = torch.full([], 2.0)
    scale.mul_(3)
    return out((scores_of(q, k) / scale).softmax(-1) @ v)


@pytest.mark.parametrize("fn", [mask_in_place, row_in_place, scale_in_place])
def test_what_is_written_to_is_not_what_it_was_made_of(fn):
    assert_fused(fn, lambda: [*three(), rows()])


def test_any_number_but_zero_is_a_token():
    """What is filled is what the condition says, not what some other condition says that often is the same."""

    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        hidden = (mask == 0).view(2, 1, 1, 5).expand(2, 3, 5, 5)
        return out((q / 2 @ k.transpose(2, 3)).masked_fill(hidden, -math.inf).softmax(-1) @ v)

    assert set(tokens().unique().tolist()) - {0, 1}
    assert_fused(fn, lambda: [*three(), tokens()])
