"""Attention through the whole compiler: in training, with gradients no farther from float64 than eager's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.passes.shared.attention.bias import LOWEST
from ferrite.passes.shared.attention.cases import heads, rows, three
from tests.attention_graphs import HALVES, masks, multi_query, out, scores_of
from tests.compare import assert_same_as_eager, compiled_graphs, since


def nano_gpt(q: Any, k: Any, v: Any, causal: Any) -> Any:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(causal[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    return out(F.softmax(scores, dim=-1) @ v)


def causal_inputs() -> list[Any]:
    return [*(heads().detach().requires_grad_() for _ in range(3)), torch.ones(8, 8).tril().view(1, 1, 8, 8)]


def test_training_through_the_compiler():
    assert_same_as_eager(nano_gpt, causal_inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


def written_in_place(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    scores = q @ k.transpose(-2, -1)
    scores /= 2
    scores.masked_fill_(hidden, -math.inf)
    return out(scores.softmax(-1) @ v)


@torch.no_grad()
def test_scores_written_in_place_are_found_once_they_are_functional():
    assert_same_as_eager(written_in_place, lambda: [*(each.detach() for each in three()), rows()])
    assert ferrite.last_compile().rewrites["sfdp_inference"] == 1


@torch.no_grad()
@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_without_the_pre_grad_stage(decompose):
    assert_same_as_eager(
        lambda q, k, v: multi_query(q, k, v),
        lambda: [each.detach() for each in three()],
        options={"pre_grad": False, "decompose": decompose},
    )
    assert ferrite.last_compile().rewrites["sfdp_inference"] == 1


@pytest.mark.slow
@since(2, 13)
def test_one_graph_serves_every_length():
    def fn(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        mask = torch.where(hidden, LOWEST, 0.0)
        return out((q @ k.mT / 2 + mask[:, None, None]).softmax(-1) @ v)

    def inputs(length: int) -> list[Any]:
        queries = [torch.randn(2, 3, length, 4, requires_grad=True) for _ in range(3)]
        return [*queries, torch.rand(2, length) > 0.7]

    compiled = assert_same_as_eager(fn, lambda: inputs(6), backward=True, dynamic=True)
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

    assert_same_as_eager(fn, inputs, backward=True)
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

    assert_same_as_eager(grouped_and_masked, inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


@pytest.mark.parametrize("value", [-1e4, -1e6, -1e9, -1e20])
@pytest.mark.parametrize("known", [True, False], ids=["written there", "given"])
def test_training_with_rows_of_numbers_far_below(value, known):
    """The logarithm of their sum has no digits left for the weights."""

    def written(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        return out((scores_of(q, k) / 2 + torch.where(hidden, value, 0.0)).softmax(-1) @ v)

    def given(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) / 2 + mask).softmax(-1) @ v)

    def inputs() -> list[Any]:
        mask = rows() if known else torch.where(rows(), value, 0.0)
        return [*(each.detach().requires_grad_() for each in three()), mask]

    assert_same_as_eager(written if known else given, inputs, backward=True)
    assert ferrite.last_compile().rewrites["sfdp"] == 1


def test_a_trained_mask_gets_its_gradient():
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) + mask).softmax(-1) @ v)

    def inputs() -> list[Any]:
        queries = [each.detach().requires_grad_() for each in three()]
        return [*queries, torch.randn(3, 1, 5, requires_grad=True)]

    assert_same_as_eager(fn, inputs, backward=True, options={"attention": "always"})
    assert ferrite.last_compile().rewrites["sfdp"] == 1
