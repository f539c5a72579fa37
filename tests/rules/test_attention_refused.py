"""What looks like attention and stays as it is, with the reason; and dropout, which draws other numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ferrite.options import Options
from ferrite.passes.shared.attention import BEFORE_AUTOGRAD
from ferrite.passes.shared.attention.cases import heads, three
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.attention_graphs import assert_refused, multi_query, out, rewritten, scores_of
from tests.graphs import operators
from tests.torch_level import captured

# --- what is refused --------------------------------------------------------------------------------------------------


def test_types_are_looked_at():
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return out((scores_of(q, k) + mask).softmax(-1).to(v.dtype) @ v)

    plain = [each.detach() for each in three()]
    assert_refused(fn, [*plain, torch.randn(5, 5, dtype=torch.float64)], "the mask is torch.float64")
    mixed = [*plain[:2], plain[2].half(), torch.randn(5, 5)]
    assert_refused(fn, mixed, "query and key are torch.float32, the value is torch.float16")


BATCHES: dict[str, list[tuple[int, ...]]] = {
    "more sequences": [(1, 3, 5, 4), (1, 3, 5, 4), (2, 3, 5, 4), (2, 1, 5, 5)],
    "more queries": [(2, 3, 1, 4), (2, 3, 5, 4), (2, 3, 5, 4), (5, 5)],
    "more keys": [(2, 3, 5, 4), (2, 3, 1, 4), (2, 3, 5, 4), (5, 5)],
    "one dimension more": [(2, 3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4), (2, 1, 1, 5, 5)],
}


@pytest.mark.quick
@pytest.mark.parametrize("shapes", BATCHES.values(), ids=BATCHES.keys())
def test_a_mask_that_makes_more_scores_is_left(shapes):
    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return ((scores_of(q, k) + mask).softmax(-1) @ v).sum(0)

    assert_refused(fn, [torch.randn(shape) for shape in shapes], "leads to no product")


@pytest.mark.quick
def test_values_with_a_larger_batch_are_left():
    def fn(q: Any, k: Any, v: Any) -> Any:
        return (scores_of(q, k).softmax(-1) @ v).sum(0)

    shapes = ((2, 3, 5, 4), (2, 3, 5, 4), (7, 2, 3, 5, 4))
    assert_refused(fn, [torch.randn(shape) for shape in shapes], "another batch than the scores")


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
    context = PassContext(Options(**REDRAWN))
    apply_rules(gm, BEFORE_AUTOGRAD, context)
    assert context.rewrites == {"sfdp_dropout": 1}
    assert not [name for name in operators(gm) if "dropout" in name or "softmax" in name]


def test_eagers_random_numbers_are_kept_by_default():
    assert_refused(dropped, three(), "the option rng is eager", {"attention": "always"})
    assert_refused(dropped, three(), "the option numerics is strict", {**REDRAWN, "numerics": "strict"})
