"""Every rule of the pre-grad stage, on every example and near miss it names.

The function is captured twice, as Dynamo gives it to a backend and by symbolic tracing. On an example the rule fires,
and then everything a caller can see is the same: values (to the bit, unless the rule says that it may round
otherwise), looks, sharing, inputs after the call, gradients and their absence. Metadata is true, no guard is added, a
second application changes nothing, and the graph spelled in torch again computes the same. On a near miss it does not
fire and `why` says the reason. The same with symbolic sizes, where firing is left to the rule.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.graph.verify import count_guards, verify_graph
from ferrite.options import Options
from ferrite.passes import all_rules
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import since
from tests.torch_level import Captured, assert_same, captured

RULES = {rule.name: rule for rule in all_rules("pre_grad")}
LEADING = set({getattr(rule, "rewrite", rule).__module__: name for name, rule in reversed(RULES.items())}.values())


def cases(*kinds: str, first: Any = None, others: Any = None) -> list[Any]:
    """One test per case of each rule; `first` marks the first case of the first rule of each family, `others` all but
    the first case of a rule."""
    return [
        pytest.param(name, case, id=f"{name}: {case.label}", marks=[mark] if mark is not None else [])
        for name, rule in RULES.items()
        for place, case in enumerate(case for kind in kinds for case in getattr(rule, kind))
        for mark in (others if place else first if name in LEADING else None,)
    ]


quick, slow = pytest.mark.quick, pytest.mark.slow
# What symbolic tracing gives another form, which the rules leave alone.
HIDDEN = {
    "sfdp: causal": "a tensor that is made while tracing is a constant of any value",
    "sfdp: filled, and a mask hides more": "the same",
    "fuse_split_getitem_squeeze_cat: some": "pieces are taken of a slice of the results",
    "fuse_split_getitem_squeeze_cat: elsewhere": "the same",
    "batch_layernorm: five with weights and biases": "each asks for sizes with a call of its own",
    "batch_layernorm: six plain ones": "the same",
    "batch_layernorm: five with weights": "the same",
    "batch_layernorm: many tiny ones, by the model": "the same",
}
TRACED = cases("examples", others=slow)


def is_exact(rule: Any) -> bool:
    """To the bit: what only moves values, and leaves them where they lie. Sums over other strides round otherwise."""
    return rule.numerics == "exact" and getattr(rule, "layout", "kept") == "kept"


def apply(rule: Any, graph: Captured, case: Any) -> int:
    return apply_rules(
        graph.gm, (rule,), PassContext(Options(**case.options), is_inference=not torch.is_grad_enabled())
    )


@pytest.mark.parametrize(("name", "case"), cases("examples", first=quick))
def test_it_fires_and_computes_the_same(name, case):
    rule = RULES[name]
    before = captured(case.function, case.make_inputs())
    after = before.copy()
    reasons = [str(miss) for miss in why(after.gm, rule, Options(**case.options))]
    assert apply(rule, after, case) >= 1, reasons
    verify_graph(after.gm, deep=True)
    assert_same(before, after, case.make_inputs, exact=is_exact(rule))
    assert apply(rule, after, case) == 0, "a second application changes something"
    as_torch(after.gm)
    after.gm.recompile()
    assert_same(before, after, case.make_inputs, exact=is_exact(rule))


@pytest.mark.parametrize(("name", "case"), [example for example in TRACED if example.id not in HIDDEN])
def test_it_fires_on_what_symbolic_tracing_gives(name, case):
    rule = RULES[name]
    before = captured(case.function, case.make_inputs(), "modules")
    after = before.copy()
    assert apply(rule, after, case) >= 1, [str(miss) for miss in why(after.gm, rule, Options(**case.options))]
    verify_graph(after.gm, deep=True)
    assert_same(before, after, case.make_inputs, exact=is_exact(rule))


@pytest.mark.parametrize(("name", "case"), [example for example in TRACED if example.id in HIDDEN])
def test_what_symbolic_tracing_hides_is_left_alone(name, case):
    graph = captured(case.function, case.make_inputs(), "modules")
    misses = why(graph.gm, RULES[name], Options(**case.options))
    assert apply(RULES[name], graph, case) == 0
    assert misses
    assert all(miss.reason for miss in misses)


@pytest.mark.parametrize(("name", "case"), cases("near_misses"))
def test_it_does_not_fire_and_says_why(name, case):
    graph = captured(case.function, case.make_inputs())
    text = str(graph.gm.graph)
    misses = why(graph.gm, RULES[name], Options(**case.options))
    assert str(graph.gm.graph) == text, "asking changed the graph"
    assert apply(RULES[name], graph, case) == 0
    assert misses, "the near miss has no candidate at all"
    assert all(miss.reason for miss in misses)


@since(2, 13)  # before, fake values of products settle symbolic sizes, and the stage leaves such graphs alone
@pytest.mark.parametrize(
    ("name", "case"), [*cases("examples", others=slow), *cases("near_misses", first=slow, others=slow)]
)
def test_symbolic_sizes_add_no_guard(name, case):
    before = captured(case.function, case.make_inputs(), symbolic=True)
    after = before.copy()
    guards = count_guards(after.gm.graph)
    apply(RULES[name], after, case)
    assert count_guards(after.gm.graph) == guards
    verify_graph(after.gm, deep=True)
    assert_same(before, after, case.make_inputs, exact=is_exact(RULES[name]))


@pytest.mark.quick
def test_every_rule_has_examples_and_near_misses():
    assert len(RULES) == len(list(all_rules("pre_grad"))), "two rules share a name"
    for rule in RULES.values():
        assert rule.purpose, rule.name
        assert rule.examples, rule.name
        assert rule.near_misses, rule.name
    assert set(HIDDEN) <= {example.id for example in TRACED}
