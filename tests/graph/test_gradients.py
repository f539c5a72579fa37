"""Where gradients flow in a graph of torch calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.graph.gradients import GradientFlow
from ferrite.options import Options
from ferrite.passes.pre_grad.metadata import values_to_examples
from ferrite.pipeline import PassContext
from ferrite.rewrite import NodeRule, apply_rules
from tests.torch_level import captured

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def names(function: Any, *flags: bool, form: Any = "dynamo") -> tuple[list[str], list[str]]:
    """The calls whose results require a gradient, and those that one reaches."""
    gm = captured(function, [torch.rand(3).requires_grad_(flag) for flag in flags], form).gm
    found = GradientFlow(gm.graph)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [n.name for n in calls if n in found.required], [n.name for n in calls if n in found.reached]


@pytest.mark.parametrize("form", ["dynamo", "modules"])
def test_a_result_requires_what_an_operand_does(form):
    assert names(lambda x, y: (x.sin(), y.cos()), True, False, form=form) == (["sin"], ["sin"])
    assert names(lambda x, y: x.sin() * y.cos(), False, True, form=form) == (["cos", "mul"], ["cos", "mul"])


@pytest.mark.parametrize("form", ["dynamo", "modules"])
def test_nothing_comes_back_through_detach_or_numbers_of_another_kind(form):
    assert names(lambda x: (x.sin().detach().cos(), x.tanh()), True, form=form) == (["sin", "tanh"], ["tanh"])
    assert names(lambda x: (x.sin() > 0, x.tanh()), True, form=form) == (["sin", "tanh"], ["tanh"])
    assert names(lambda x: (torch.zeros_like(x.sin()).cos(), x.tanh()), True, form=form)[1] == ["tanh"]


def test_what_nobody_reads_gets_none():
    def function(x):
        x.exp()
        return x.sin()

    required, reached = names(function, True, form="modules")
    assert set(required) == {"exp", "sin"}
    assert reached == ["sin"]


def test_modes_are_followed():
    def function(x):
        with torch.no_grad():
            first = x.sin()
        return first.cos(), x.tanh()

    assert names(function, True) == (["tanh"], ["tanh"])


def test_values_that_a_rewrite_made_are_worked_out():
    def function(x):
        with torch.no_grad():
            first = x.sin()
        return first.cos(), x.sin().tanh(), x.sin().detach().exp()

    rule = NodeRule("twice", "", (aten.sin.default,), lambda site: site.call(aten.cos.default, site.arguments["self"]))
    gm = captured(function, [torch.rand(3).requires_grad_()]).gm
    assert apply_rules(gm, (rule,), PassContext(Options())) == 3
    for _ in range(2):
        found = GradientFlow(gm.graph)
        calls = [node for node in gm.graph.nodes if node.target in (aten.cos.default, aten.tanh.default)]
        assert [node in found.required for node in calls] == [False, False, True, True, True]
        assert [node in found.reached for node in calls] == [False, False, True, True, False]
        values_to_examples(gm)  # now the values that know nothing stand where Dynamo's did
