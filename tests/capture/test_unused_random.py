"""Random numbers that are drawn and dropped move the generator as in eager."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

import ferrite
from ferrite.capture.unused_random import never_draws
from tests.compare import assert_same_as_eager

pytestmark = [pytest.mark.quick, pytest.mark.lengthy]


def dropped(x):
    torch.rand(3)
    return x + 1


def dropped_behind_other_calls(x):
    F.dropout(x, 0.5).relu().sum()
    torch.randn_like(x).sin()
    return x + 1


def written_to_dropped_memory(x):
    torch.empty(3).normal_()
    x.clone().uniform_()
    return x + 1


def dropped_beside_used(x):
    used = torch.rand(2)
    torch.randperm(4)
    torch.bernoulli(torch.full((2,), 0.5))
    x.detach().abs().multinomial(1)
    return x * used, None, [torch.rand(2)]


CASES = [dropped, dropped_behind_other_calls, written_to_dropped_memory, dropped_beside_used]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", CASES)
def test_the_generator_ends_where_eager_leaves_it(fn, dynamic, backward):
    def make_inputs():
        return [torch.rand(2, requires_grad=backward)]

    assert_same_as_eager(fn, make_inputs, backward=backward, dynamic=dynamic, exact=False, calls=2)


def test_random_numbers_written_to_an_input():
    assert_same_as_eager(lambda x: x.add_(torch.rand(3)).sum(), lambda: [torch.ones(3)], exact=False)
    assert_same_as_eager(lambda x: x.uniform_().sum(), lambda: [torch.ones(3)], exact=False)


def test_in_place_calls_that_lead_nowhere_change_no_shape():
    """Asking whether a call is random runs it once on stand-ins, never on the values of the graph."""

    def fn(x):
        y = x.clone()
        z = y.view(6)
        y.unsqueeze_(0)
        return z + 1

    assert_same_as_eager(fn, lambda: [torch.rand(2, 3)])


def test_switches_of_modes_that_lead_nowhere_are_not_tried_out():
    """Nobody reads the two calls around a region; run alone, the first would put all that follows under autocast."""

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            inside = x @ x
        return x @ x, inside

    assert_same_as_eager(fn, lambda: [torch.rand(3, 3)], exact=False)
    assert_same_as_eager(fn, lambda: [torch.rand(3, 3)], exact=False, options={"pre_grad": False})
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stage", ["capture", "partition"])
def test_a_failing_stage_keeps_results_and_generator(stage):
    torch.manual_seed(0)
    expected, following = dropped_beside_used(torch.ones(2, requires_grad=True)), torch.rand(1)
    compiled = torch.compile(dropped_beside_used, backend="ferrite", options={"fail_at": stage, "keep_repro": False})
    torch.manual_seed(0)
    with pytest.warns(ferrite.FerriteWarning):
        result = compiled(torch.ones(2, requires_grad=True))
    assert len(result) == 3
    assert torch.equal(result[0], expected[0])
    assert torch.equal(torch.rand(1), following)


@pytest.mark.parametrize("executor", ["native", "calls"])
def test_a_graph_without_unused_random_numbers_is_left_alone(executor):
    options = {"strict": True, "executor": executor}
    torch.compile(lambda x: (x + torch.rand(2), x.sin()), backend="ferrite", options=options)(torch.ones(2))
    (graph,) = ferrite.last_compile().graphs
    assert re.search(r"return \[\w+, \w+\]", graph.source)


def test_operators_that_cannot_draw_are_not_tried_out():
    """They are known by name; dropout is made of others, and `bernoulli_` draws itself."""
    assert all(never_draws(name) for name in ("add_", "_foreach_mul_", "copy_"))
    assert not any(never_draws(name) for name in ("dropout", "bernoulli_", "rand", "view_as_nothing", "__xor__"))
