"""Attention written out, in every spelling of the tables: one call is left, and it computes what eager does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from compare import assert_no_farther, check, compiled_graphs, since, upcast_tree
from ferrite.options import Options
from ferrite.passes.attention import BEFORE_AUTOGRAD, FOR_INFERENCE
from ferrite.passes.attention.cases import LOWEST, heads, rows, three, tokens
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from graphs import operators
from torch_level import captured

SDPA = torch.ops.aten.scaled_dot_product_attention.default
HALVES = (torch.float16, torch.bfloat16)
Function = Callable[..., Any]


def rewritten(
    fn: Function, inputs: list[Any], level: str = "torch", options: Any = None, training: bool = False
) -> tuple[Callable[..., Any], int, list[str]]:
    """What became of a function, how many calls of attention it has, and why others have not been made.

    `level`: as Dynamo captures it (torch), as symbolic tracing does (traced), or in ATen.
    """
    settings = Options(**(options or {}))
    rules = FOR_INFERENCE if level == "aten" else BEFORE_AUTOGRAD
    if level == "aten":
        gm, arrange = make_fx(fn, tracing_mode="fake")(*inputs), list
    else:
        found = captured(fn, inputs, "dynamo" if level == "torch" else "modules")
        gm, arrange = found.gm, found.arrange
    apply_rules(gm, rules, PassContext(settings, is_inference=not training))
    reasons = [miss.reason for rule in rules for miss in why(gm, rule, settings)]
    count = sum(node.target is SDPA for node in gm.graph.nodes)
    gm.recompile()

    def run(*given: Any) -> Any:
        result = gm(*arrange(given))
        return result[0] if isinstance(result, tuple) else result

    return run, count, reasons


@torch.no_grad()
def assert_fused(fn: Function, make_inputs: Callable[[], list[Any]], level: str = "torch") -> None:
    """One call is left, and it is no farther from float64 than eager is."""
    torch.manual_seed(0)
    inputs = make_inputs()
    run, count, reasons = rewritten(fn, inputs, level)
    assert count == 1, reasons
    mine, theirs = run(*inputs), fn(*inputs)
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert_no_farther(mine, theirs, fn(*upcast_tree(inputs)), "result")


def assert_refused(fn: Function, inputs: list[Any], reason: str, options: Any = None, training: bool = False) -> None:
    _, count, reasons = rewritten(fn, inputs, "torch", options, training)
    assert count == 0
    assert any(reason in each for each in reasons), reasons


def out(result: torch.Tensor) -> torch.Tensor:
    """As models go on: heads side by side."""
    return result.transpose(1, 2).reshape(result.shape[0], result.shape[2], -1)


# --- spellings --------------------------------------------------------------------------------------------------------


def multi_query(q: Any, k: Any, v: Any) -> Any:
    """One head of keys and values serves all queries, by broadcasting."""
    return out((q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v)


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
    "another number of keys": (multi_query, lambda: [heads(), heads(2, 7, 3, 4), heads(2, 7, 3, 4)]),
    "batch 1": (multi_query, lambda: [heads(1, 5, 3, 4) for _ in range(3)]),
    "one query": (multi_query, lambda: [heads(2, 1, 3, 4), heads(), heads()]),
    "large scores": (multi_query, lambda: [heads() * 300, heads() * 300, heads()]),
    "double precision": (multi_query, lambda: three(torch.float64)),
    "five dimensions": (five_dimensions, lambda: [torch.randn(2, 3, 2, 5, 4) for _ in range(3)]),
}


@pytest.mark.quick
@pytest.mark.parametrize("label", SPELLINGS)
def test_every_spelling_becomes_one_call(label):
    assert_fused(*SPELLINGS[label])


@pytest.mark.quick
@pytest.mark.parametrize(
    "label", sorted(SPELLINGS.keys() - {"einsum"})
)  # which is in parts there, with one more dimension
def test_every_spelling_becomes_one_call_in_aten(label):
    assert_fused(*SPELLINGS[label], "aten")


CHANGES: dict[str, Function] = {
    "scale": lambda s, m, t: s * 0.5,
    "tensor scale": lambda s, m, t: s / torch.full([], 2.0),
    "mask": lambda s, m, t: s + m,
    "fill": lambda s, m, t: s.masked_fill(t == 0, -math.inf),
    "where": lambda s, m, t: torch.where(t != 0, s, LOWEST),
}


@pytest.mark.quick
@pytest.mark.parametrize("level", ["traced", "aten"])
@pytest.mark.parametrize("order", itertools.permutations(CHANGES, 3), ids="-".join)
def test_what_happens_to_the_scores_happens_in_any_order(order, level):
    def fn(q: Any, k: Any, v: Any, mask: Any, tokens: Any) -> Any:
        scores = q @ k.transpose(2, 3)
        for name in order:
            scores = CHANGES[name](scores, mask, tokens[:, None, None])
        return out(scores.softmax(-1) @ v)

    assert_fused(fn, lambda: [*three(), torch.randn(2, 1, 5, 5), tokens()], level)


# --- masks ------------------------------------------------------------------------------------------------------------


def masks() -> dict[str, torch.Tensor]:
    hidden, half_hidden = rows(), torch.zeros(2, 1, 5, 5)
    half_hidden[1, :, 1] = -math.inf
    half_hidden[0, :, 2] = LOWEST
    return {
        "rows of minus infinity": torch.zeros(5, 5).masked_fill(hidden, -math.inf),
        "rows of the lowest number": torch.zeros(5, 5).masked_fill(hidden, LOWEST),
        "both": half_hidden,
        "every key of a sequence": torch.tensor([0.0, -math.inf]).view(2, 1, 1, 1),
        "a bias for each head": torch.randn(3, 5, 5),
        "a vector": torch.randn(5),
        "nan": torch.zeros(5, 5).index_fill(0, torch.tensor(1), math.nan),
        "infinity": torch.zeros(5, 5).index_fill(1, torch.tensor(1), math.inf),
    }


@pytest.mark.quick
@pytest.mark.parametrize("level", ["traced", "aten"])
@pytest.mark.parametrize("name", masks())
def test_a_mask_that_nobody_knows_keeps_eagers_rows(name, level):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((q @ k.mT / 2 + mask).softmax(-1) @ v)

    assert_fused(fn, lambda: [*three(), masks()[name]], level)


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


def test_any_number_but_zero_is_a_token():
    """What is filled is what the condition says, not what some other condition says that often is the same."""

    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        hidden = (mask == 0).view(2, 1, 1, 5).expand(2, 3, 5, 5)
        return out((q / 2 @ k.transpose(2, 3)).masked_fill(hidden, -math.inf).softmax(-1) @ v)

    assert set(tokens().unique().tolist()) - {0, 1}
    assert_fused(fn, lambda: [*three(), tokens()])


# --- what is refused --------------------------------------------------------------------------------------------------


def scores_of(q: Any, k: Any) -> Any:
    return q @ k.transpose(2, 3)


def test_types_are_looked_at():
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) + mask).softmax(-1).to(v.dtype) @ v)

    plain = [each.detach() for each in three()]
    assert_refused(fn, [*plain, torch.randn(5, 5, dtype=torch.float64)], "the mask is torch.float64")
    mixed = [*plain[:2], plain[2].half(), torch.randn(5, 5)]
    assert_refused(fn, mixed, "query and key are torch.float32, the value is torch.float16")


def test_dropout_by_a_generator_of_ones_own_stays():
    def fn(q: Any, k: Any, v: Any, kept: Any) -> Any:
        return out(scores_of(q, k).softmax(-1) * kept @ v)

    options = {"attention": "always", "rng": "counter"}
    kept = torch.empty(5, 5).bernoulli_(0.5, generator=torch.Generator().manual_seed(1))
    assert_refused(fn, [*three(), kept], "leads to no softmax", options)


def test_narrowing_scores_is_no_part_of_attention():
    def fn(q: Any, k: Any, v: Any) -> Any:
        return out(scores_of(q, k).half().softmax(-1).float() @ v)

    assert_refused(fn, three(), "leads to no product")


def test_a_copy_of_keys_that_are_written_to_is_read():
    def fn(q: Any, k: Any, v: Any) -> Any:
        copied = k.clone()
        k.mul_(2)
        return out(scores_of(q, copied).softmax(-1) @ v)

    inputs = [each.detach().clone() for each in three()]
    expected = fn(*(each.clone() for each in inputs))
    run, _, _ = rewritten(fn, [each.clone() for each in inputs])
    torch.testing.assert_close(run(*(each.clone() for each in inputs)), expected)


def test_trained_masks_are_for_whoever_asks():
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) + mask.clamp(-1, 1)).softmax(-1) @ v)

    inputs = [*three(), torch.randn(5, 5, requires_grad=True)]
    assert rewritten(fn, inputs)[1] == 0
    assert rewritten(fn, inputs, options={"attention": "always"})[1] == 1


def test_training_with_many_keys_is_left_to_products():
    inputs = [heads(1, length, 2, 4) for length in (3, 129, 129)]
    assert_refused(multi_query, inputs, "with so many keys", training=True)
    assert rewritten(multi_query, inputs, training=True, options={"attention": "always"})[1] == 1
    assert rewritten(multi_query, inputs)[1] == 1


# --- dropout ----------------------------------------------------------------------------------------------------------

REDRAWN = {"attention": "always", "rng": "counter"}


def dropped(q: Any, k: Any, v: Any) -> Any:
    return out(F.dropout(scores_of(q, k).softmax(-1), 0.25) @ v)


def test_dropout_has_the_same_distribution():
    """The mean of many draws is the result without dropout, the variance that of eager."""
    inputs = [heads(1, 5, 3, 4).detach().expand(8000, 3, 5, 4) for _ in range(3)]
    run, count, reasons = rewritten(dropped, inputs, options=REDRAWN)
    assert count == 1, reasons
    ours, eager = run(*inputs), dropped(*inputs)
    spread = eager.std(0)
    whole = out(scores_of(*inputs[:2]).softmax(-1) @ inputs[2])[0]
    assert ((ours.mean(0) - whole).abs() <= 6 * spread / math.sqrt(8000)).all()
    assert ((ours.std(0) - spread).abs() <= 0.1 * spread).all()


def test_weights_are_dropped_once():
    gm = captured(dropped, three()).gm
    assert apply_rules(gm, BEFORE_AUTOGRAD, PassContext(Options(**REDRAWN))) == 1
    assert not [name for name in operators(gm) if "dropout" in name or "softmax" in name]


def test_eagers_random_numbers_are_kept_by_default():
    assert_refused(dropped, three(), "the option rng is eager", {"attention": "always"})
    assert_refused(dropped, three(), "the option numerics is strict", {**REDRAWN, "numerics": "strict"})


# --- the whole compiler -----------------------------------------------------------------------------------------------


def nano_gpt(q: Any, k: Any, v: Any, causal: Any) -> Any:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(causal[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    return out(F.softmax(scores, dim=-1) @ v)


def causal_inputs() -> list[Any]:
    return [*(heads().detach().requires_grad_() for _ in range(3)), torch.ones(8, 8).tril().view(1, 1, 8, 8)]


def test_training_through_the_compiler():
    check(nano_gpt, causal_inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


def written_in_place(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    scores = q @ k.transpose(-2, -1)
    scores /= 2
    scores.masked_fill_(hidden, -math.inf)
    return out(scores.softmax(-1) @ v)


@torch.no_grad()
def test_scores_written_in_place_are_found_once_they_are_functional():
    check(written_in_place, lambda: [*(each.detach() for each in three()), rows()])
    assert ferrite.last_compile().rewrites["sfdp_inference"] == 1


@torch.no_grad()
@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_without_the_pre_grad_stage(decompose):
    check(
        lambda q, k, v: multi_query(q, k, v),
        lambda: [each.detach() for each in three()],
        options={"pre_grad": False, "decompose": decompose},
    )
    assert ferrite.last_compile().rewrites["sfdp_inference"] == 1


@since(2, 13)
def test_one_graph_serves_every_length():
    def fn(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        mask = torch.where(hidden, LOWEST, 0.0)
        return out((q @ k.mT / 2 + mask[:, None, None]).softmax(-1) @ v)

    def inputs(length: int) -> list[Any]:
        queries = [torch.randn(2, 3, length, 4, requires_grad=True) for _ in range(3)]
        return [*queries, torch.rand(2, length) > 0.7]

    compiled = check(fn, lambda: inputs(6), backward=True, dynamic=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1
    torch.manual_seed(1)
    longer = inputs(9)
    torch.testing.assert_close(compiled(*longer), fn(*longer))
    assert compiled_graphs() == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_training_in_half_precision(dtype):
    def fn(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
        return out(scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v)

    def inputs() -> list[Any]:
        return [*(heads(dtype=dtype).detach().requires_grad_() for _ in range(3)), rows()]

    check(fn, inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


def grouped_and_masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, 1)
    return out((q @ k.mT / 2 + mask).softmax(-1) @ v)


@pytest.mark.parametrize("name", masks())
def test_training_with_a_mask_that_nobody_knows(name):
    def inputs() -> list[Any]:
        shapes = ((2, 5, 6, 4), (2, 5, 2, 4), (2, 5, 2, 4))
        mask = masks()[name]
        mask = mask.repeat(2, 1, 1) if name == "a bias for each head" else mask
        return [*(heads(*shape).detach().requires_grad_() for shape in shapes), mask]

    check(grouped_and_masked, inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


def test_a_trained_mask_gets_its_gradient():
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) + mask).softmax(-1) @ v)

    def inputs() -> list[Any]:
        queries = [each.detach().requires_grad_() for each in three()]
        return [*queries, torch.randn(3, 1, 5, requires_grad=True)]

    check(fn, inputs, backward=True, options={"attention": "always"})
    assert ferrite.last_compile().rewrites["sfdp"] == 1
