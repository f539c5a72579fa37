"""Sampling without a softmax: the same noise gives the same index, and eager's answers where there is no softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad.sampling import GUMBEL_RULE
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_same_as_eager
from tests.torch_level import Captured, assert_same, captured

aten = torch.ops.aten


def rewritten(graph: Captured, **options) -> tuple[Captured, int]:
    after = graph.copy()
    count = apply_rules(after.gm, (GUMBEL_RULE,), PassContext(Options(**options)))
    verify_graph(after.gm, deep=True)
    return after, count


def sample(logits):
    probs = F.softmax(logits, dim=-1)
    return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=True)


def test_the_same_noise_gives_the_same_index():
    def inputs():
        return [torch.randn(100_000, 12) * 4]

    before = captured(sample, [torch.randn(100_000, 12)])
    after, fired = rewritten(before)
    assert fired == 1
    assert aten.softmax.int not in [node.target for node in after.gm.graph.nodes]
    results, states = [], []
    for graph in (before, after):
        torch.manual_seed(3)
        results.append(graph.gm(*graph.arrange(inputs()))[0])
        states.append(torch.get_rng_state())
    assert torch.equal(*results)
    assert torch.equal(*states), "the generator is left as before"


def test_frequencies_are_those_of_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    graph, fired = rewritten(captured(sample, [logits.expand(200_000, 4).contiguous()]))
    assert fired == 1
    torch.manual_seed(0)
    (index,) = graph.gm(logits.expand(200_000, 4).contiguous())
    found = torch.bincount(index.flatten(), minlength=4) / index.numel()
    torch.testing.assert_close(found, logits.softmax(0), atol=4e-3, rtol=0)


def test_rows_without_a_softmax():
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, -inf, 1.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, 1.0, nan], [-inf, -inf, 2.0], [nan, inf, 0.0]]

    logits = torch.tensor(rows).repeat(50, 1)
    before = captured(sample, [logits])
    after, fired = rewritten(before)
    assert fired == 1
    found = []
    for graph in (before, after):
        torch.manual_seed(0)
        found.append(graph.gm(logits)[0])
    assert torch.equal(*found)
    assert found[0].unique().numel() > 1


def test_large_logits_lose_no_precision():
    """Near a million one unit in the last place of a logit is worth more than most of the noise."""

    def inputs():
        return [torch.randint(-8, 8, (4000, 6)) * 0.125 + 1e6]

    before = captured(sample, inputs())
    after, fired = rewritten(before)
    assert fired == 1
    assert_same(before, after, inputs)


@pytest.mark.parametrize(
    "draw",
    [
        lambda noise: noise.exponential_(),
        lambda noise: noise.exponential_(1.0),
        lambda noise: noise.exponential_(lambd=1),
        lambda noise: noise.exponential_(1, generator=None),
    ],
)
@pytest.mark.parametrize("form", ["dynamo", "modules"])
def test_every_way_to_draw(draw, form):
    def inputs():
        return [torch.randn(5, 7)]

    before = captured(lambda x: x.softmax(-1).div(draw(torch.empty_like(x))).argmax(-1), inputs(), form)
    after, fired = rewritten(before)
    assert fired == 1
    assert_same(before, after, inputs)


def test_arguments_by_name_and_other_dimensions():
    def inputs():
        return [torch.randn(3, 6, 4)]

    def fn(x):
        probs = torch.softmax(input=x, dim=1)
        noise = torch.empty_like(probs)
        noise.exponential_()
        return torch.argmax(input=torch.div(probs, noise), dim=-2)

    before = captured(fn, inputs())
    after, fired = rewritten(before)
    assert fired == 1
    assert_same(before, after, inputs)


def zeroed(x):
    x = x * 1
    quotient = x.softmax(-1) / torch.empty_like(x).exponential_()
    x.zero_()
    return quotient.argmax(-1), x


def noise_overwritten(x):
    noise = torch.empty_like(x).exponential_()
    quotient = x.softmax(-1) / noise
    noise.zero_()
    return quotient.argmax(-1)


def noise_over_logits(x):
    x = x * 1
    probs = x.softmax(-1)
    return torch.argmax(probs / x.exponential_(), -1)


def integers(x):
    return torch.argmax(x.long().softmax(-1, dtype=torch.float32) / torch.empty_like(x).exponential_(), -1)


def two_readers(x):
    probs = x.softmax(-1)
    return torch.argmax(probs / torch.empty_like(probs).exponential_(), -1), probs


def more_noise(x):
    return torch.argmax(x.softmax(-1) / torch.empty(2, *x.shape).exponential_(), 2)


def inside_no_grad(x):
    probs = x.softmax(-1)
    with torch.no_grad():
        return torch.argmax(probs / torch.empty_like(x).exponential_(), -1)


@pytest.mark.parametrize(
    "fn", [zeroed, noise_overwritten, noise_over_logits, integers, two_readers, more_noise, inside_no_grad]
)
def test_it_is_left(fn):
    def inputs():
        return [torch.randn(5, 7) * 3]

    before = captured(fn, inputs())
    after, fired = rewritten(before)
    assert fired == 0
    assert_same(before, after, inputs)


def test_through_the_compiler():
    def probs_of_half(x):
        return sample(x.to(torch.bfloat16))

    for fn in (sample, probs_of_half):
        assert_same_as_eager(fn, lambda: [torch.randn(6, 50)], exact=False, options={"kernel_rewrites": "always"})
        assert ferrite.last_compile().rewrites["gumbel_argmax"] == 1
    for options in ({"gumbel_argmax": False}, {"numerics": "strict"}, {"skip": ["gumbel-argmax"]}):
        assert_same_as_eager(
            sample, lambda: [torch.randn(6, 50)], exact=False, options={"kernel_rewrites": "always", **options}
        )
        assert "gumbel_argmax" not in ferrite.last_compile().rewrites, options
