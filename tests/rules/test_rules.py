"""Every rule, on every example and near miss it names: the whole procedure in one place.

On an example the rule fires, and then the graph computes the same: values (to the bit, unless the rule says that it may
round otherwise, or changes the order in which sums behind it read memory), dtype, shape, strides, device; what inputs
and outputs share; the inputs after the call; the metadata left on the nodes is what running them again gives; no guard
was added; a second application changes nothing. On a near miss it does not fire, and `why` says the reason. The same
with symbolic sizes, where firing is left to the rule. With strict numerics every bit stays, and a rule that may round
otherwise says that this is why it does not fire.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.verify import count_guards
from ferrite.options import Options
from ferrite.passes import all_rules
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, apply_rules, why
from ferrite.rewrite.arguments import arguments_of
from tests.graphs import assert_metadata_is_true, assert_same_computation

STAGES = ("joint", "freeze", "post_grad")  # on functional ATen graphs; pre-grad rules have a procedure of their own
RULES = {rule.name: rule for stage in STAGES for rule in all_rules(stage)}
POST_GRAD = {rule.name for rule in all_rules("post_grad")}


def cases(kind: str, *, first: Any = None, others: Any = None) -> list[Any]:
    """One test per case of each rule; `first` and `others` mark the first case of a rule, and the rest."""
    return [
        pytest.param(name, case, id=f"{name}: {case.label}", marks=[mark] if mark is not None else [])
        for name, rule in RULES.items()
        for place, case in enumerate(getattr(rule, kind))
        for mark in (others if place else first,)
    ]


quick, slow = pytest.mark.quick, pytest.mark.slow


def traced(case: Case, mode: str) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    gm = make_fx(case.function, tracing_mode=mode)(*case.make_inputs())
    fakes = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in fakes)
    return gm


def apply(rule: Any, gm: torch.fx.GraphModule, case: Case, **more: Any) -> int:
    context = PassContext(Options(**case.options, **more))
    total = apply_rules(gm, (rule,), context)
    assert sum(context.rewrites.values()) == total
    return total


def keeps_bits(rule: Any) -> bool:
    return rule.numerics == "exact" and rule.layout == "kept"


@pytest.mark.parametrize(("name", "case"), cases("examples", first=quick))
def test_it_fires_and_computes_the_same(name, case):
    before = traced(case, "fake")
    after = copy.deepcopy(before)
    assert apply(RULES[name], after, case) >= 1, list(map(str, why(after, RULES[name], Options(**case.options))))
    assert_same_computation(before, after, case.make_inputs, exact=keeps_bits(RULES[name]))
    assert_metadata_is_true(after)
    assert apply(RULES[name], after, case) == 0, "a second application changes something"


@pytest.mark.parametrize(("name", "case"), cases("near_misses", first=quick))
def test_it_does_not_fire_and_says_why(name, case):
    gm = traced(case, "fake")
    text = str(gm.graph)
    misses = why(gm, RULES[name], Options(**case.options))
    assert str(gm.graph) == text, "asking changed the graph"
    assert apply(RULES[name], gm, case) == 0
    assert misses, "the near miss has no candidate at all"
    assert all(miss.reason for miss in misses)


@pytest.mark.parametrize(
    ("name", "case"), [*cases("examples", others=slow), *cases("near_misses", first=slow, others=slow)]
)
def test_symbolic_sizes_add_no_guard(name, case):
    before = traced(case, "symbolic")
    after = copy.deepcopy(before)
    guards = count_guards(after.graph)
    apply(RULES[name], after, case)
    assert count_guards(after.graph) == guards
    assert_same_computation(before, after, case.make_inputs, exact=keeps_bits(RULES[name]))
    assert_metadata_is_true(after)


@pytest.mark.parametrize(("name", "case"), cases("examples", others=slow))
def test_strict_numerics_keep_every_bit(name, case):
    rule, before = RULES[name], traced(case, "fake")
    if "numerics" in case.options:
        pytest.skip("the example is one of strict numerics itself")
    after = copy.deepcopy(before)
    fired = apply(rule, after, case, numerics="strict")
    assert_same_computation(before, after, case.make_inputs, exact=True)
    if rule.numerics == "exact":
        assert fired or rule.layout == "free"
    else:
        assert not fired
        reasons = {miss.reason for miss in why(after, rule, Options(**case.options, numerics="strict"))}
        assert any("the option numerics is strict" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("name", "case"), [each for each in cases("examples", others=slow) if each.values[0] in POST_GRAD]
)
def test_calls_may_name_all_their_arguments(name, case):
    """As a pass of a user may write them: nothing by position, defaults spelled out."""
    before = traced(case, "fake")
    after = copy.deepcopy(before)
    for node in after.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.args, node.kwargs = (), arguments_of(node)
    assert apply(RULES[name], after, case) == apply(RULES[name], copy.deepcopy(before), case)
    assert_same_computation(before, after, case.make_inputs, exact=keeps_bits(RULES[name]))


def test_every_rule_has_examples_and_near_misses():
    assert len(RULES) == len({id(rule) for stage in STAGES for rule in all_rules(stage)}), "two rules share a name"
    for rule in RULES.values():
        assert rule.purpose, rule.name
        assert rule.examples, rule.name
        assert rule.near_misses, rule.name
