"""Every rule, on every example and near miss it names: the whole procedure in one place.

On an example the rule fires, and then the graph computes the same: values (no farther from float64 than before),
dtype, shape, strides, device; what inputs and outputs share; the inputs after the call; the metadata left on the nodes
is what running them again gives; no guard was added; a second application changes nothing. On a near miss it does not
fire, and `why` says the reason. The same with symbolic sizes, where firing is left to the rule.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from compare import assert_no_farther, upcast_tree
from ferrite.graph.values import compute, mode_of
from ferrite.graph.verify import count_guards
from ferrite.options import Options
from ferrite.passes import all_rules
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, apply_rules, why
from ferrite.rewrite.engine import difference

pytestmark = pytest.mark.quick
RULES = {rule.name: rule for rule in all_rules()}


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}: {case.label}")
        for name, rule in RULES.items()
        for case in getattr(rule, kind)
    ]


def traced(case: Case, mode: str) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    gm = make_fx(case.function, tracing_mode=mode)(*case.make_inputs())
    fakes = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in fakes)
    return gm


def apply(rule: Any, gm: torch.fx.GraphModule) -> int:
    context = PassContext(Options())
    total = apply_rules(gm, (rule,), context)
    assert sum(context.rewrites.values()) == total
    return total


def run(
    gm: torch.fx.GraphModule, case: Case, upcast: bool = False
) -> tuple[list[Any], list[Any], set[tuple[int, int]]]:
    """Outputs, inputs after the call, and which pairs of them share storage."""
    torch.manual_seed(0)
    inputs = case.make_inputs()
    inputs = upcast_tree(inputs) if upcast else inputs
    outputs = pytree.tree_leaves(gm(*inputs))
    tensors = [item for item in (*inputs, *outputs) if isinstance(item, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    pairs = {(i, j) for i, a in enumerate(storages) for j, b in enumerate(storages) if i < j and a == b}
    return outputs, inputs, pairs


def assert_same_computation(before: torch.fx.GraphModule, after: torch.fx.GraphModule, case: Case) -> None:
    old, old_inputs, old_pairs = run(before, case)
    new, new_inputs, new_pairs = run(after, case)
    assert new_pairs == old_pairs
    for mine, theirs in zip(new_inputs, old_inputs, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
    assert len(new) == len(old)
    for mine, theirs in zip(new, old, strict=True):
        assert difference(theirs, mine) is None
        if theirs.is_meta:
            continue
        if theirs.is_floating_point():
            assert_no_farther(mine, theirs, theirs.double(), "result")
        else:
            assert torch.equal(mine, theirs)


def assert_metadata_is_true(gm: torch.fx.GraphModule) -> None:
    gm.graph.lint()
    mode = mode_of(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            again, _ = compute(node, mode)
            for left, right in zip(pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(again), strict=True):
                assert difference(left, right) is None, node.format_node()


@pytest.mark.parametrize(("name", "case"), cases("examples"))
def test_it_fires_and_computes_the_same(name, case):
    before = traced(case, "fake")
    after = copy.deepcopy(before)
    assert apply(RULES[name], after) >= 1, [str(miss) for miss in why(after, RULES[name])]
    assert_same_computation(before, after, case)
    assert_metadata_is_true(after)
    assert apply(RULES[name], after) == 0, "a second application changes something"


@pytest.mark.parametrize(("name", "case"), cases("near_misses"))
def test_it_does_not_fire_and_says_why(name, case):
    gm = traced(case, "fake")
    text = str(gm.graph)
    misses = why(gm, RULES[name])
    assert str(gm.graph) == text, "asking changed the graph"
    assert apply(RULES[name], gm) == 0
    assert misses, "the near miss has no candidate at all"
    assert all(miss.reason for miss in misses)


@pytest.mark.parametrize(("name", "case"), [*cases("examples"), *cases("near_misses")])
def test_symbolic_sizes_add_no_guard(name, case):
    before = traced(case, "symbolic")
    after = copy.deepcopy(before)
    guards = count_guards(after.graph)
    apply(RULES[name], after)
    assert count_guards(after.graph) == guards
    assert_same_computation(before, after, case)
    assert_metadata_is_true(after)


def test_every_rule_has_examples_and_near_misses():
    assert len(RULES) == len(list(all_rules())), "two rules share a name"
    for rule in RULES.values():
        assert rule.purpose, rule.name
        assert rule.examples, rule.name
        assert rule.near_misses, rule.name
