"""relu and nan_to_num in one order, on all special values; elementwise calls in front of joins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad import relu_nan_to_num, remove_split_ops_pass, sink_cat_after_pointwise
from ferrite.passes.pre_grad.predicates import EXACT, ROUNDED
from ferrite.pipeline import GraphPass, PassContext
from tests.torch_level import Captured, assert_same, captured, same_bits

aten = torch.ops.aten


def apply(step: GraphPass, before: Captured, **options: Any) -> tuple[Captured, int]:
    after = before.copy()
    count = step.function(after.gm, PassContext(Options(strict=True, **options))) or 0
    verify_graph(after.gm, deep=True)
    return after, count


def targets(graph: Captured) -> list[Any]:
    return [node.target for node in graph.gm.graph.nodes if node.op.startswith("call")]


# --- relu and nan_to_num ----------------------------------------------------------------------------------------------


def special(dtype: torch.dtype) -> torch.Tensor:
    """Every kind of number."""
    info = torch.finfo(dtype)
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, info.max, info.min]
    return torch.tensor(values, dtype=dtype)


REPLACEMENTS = (None, -3.0, 0.0, 2.0, 1e5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("nan", REPLACEMENTS)
def test_every_replacement_gives_the_same_numbers_and_gradients(nan, dtype):
    """In float16 1e5 is infinite."""
    x = special(dtype)
    before = captured(replacing(nan), [x], "modules")
    after, count = apply(relu_nan_to_num, before)
    assert count >= 25
    mine, theirs = outcome(after, x), outcome(before, x)
    assert len(theirs) == 2 * 3 * 25
    for place, pair in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(*(each.abs() for each in pair)), place  # a gradient of zero may be -0.0


def replacing(nan: Any) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        results = []
        for given in itertools.product((nan,), REPLACEMENTS, REPLACEMENTS):
            inner = torch.nan_to_num(torch.relu(x), *given)
            between = torch.nan_to_num(torch.relu(torch.nan_to_num(x, *given)), *given)
            results += [inner, between, torch.nan_to_num(torch.nan_to_num(x, *given))]
        return results

    return function


def outcome(graph: Captured, x: torch.Tensor) -> list[torch.Tensor]:
    graph.gm.recompile()
    x = x.clone().requires_grad_()
    results = graph.gm(x)
    gradients = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in results]
    return [*(result.detach() for result in results), *gradients]


@pytest.mark.quick
def test_relu_stands_behind():
    before = captured(lambda x: torch.nan_to_num(torch.relu(x), 1.0, neginf=2.0), [torch.rand(3)])
    after, count = apply(relu_nan_to_num, before)
    assert (count, targets(after)) == (1, [aten.nan_to_num.default, aten.relu.default])
    (first,) = after.gm.graph.find_nodes(op="call_function", target=aten.nan_to_num.default)
    assert first.args[1:] == (1.0, None, None)


@pytest.mark.quick
def test_writing_forms_stay():
    def function(x: Any) -> Any:
        y = x * 2
        y.relu_()
        y.nan_to_num_()
        return torch.nan_to_num(y)

    before = captured(function, [torch.rand(3)])
    assert apply(relu_nan_to_num, before)[1] == 0


# --- sink_cat_after_pointwise -----------------------------------------------------------------------------------------

FUSED: dict[str, Any] = {"kernel_rewrites": "always"}


def two(*dtypes: torch.dtype) -> Callable[[], list[Any]]:
    chosen = dtypes or (torch.float32, torch.float32)
    return lambda: [(torch.randn(2, 3) * 4).to(dtype) for dtype in chosen]


GIVEN: dict[Any, dict[str, Any]] = {
    aten.clamp.default: {"min": -0.5},
    aten.clamp_min.default: {"min": 0.25},
    aten.clamp_max.default: {"max": 0.25},
    aten.round.decimals: {"decimals": 1},
    aten.to.dtype: {"dtype": torch.float64},
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_elementwise_operator_sinks(dtype, exact):
    operators = EXACT if exact else ROUNDED

    def function(a: Any, b: Any) -> Any:
        return [target(torch.cat([a * 2, b], 1), **GIVEN.get(target, {})) for target in operators]

    make = two(dtype, dtype)
    before = captured(function, make(), "modules")
    after, count = apply(sink_cat_after_pointwise, before, **FUSED)
    assert count == len(operators)
    (results,) = after.gm.graph.output_node().args
    assert {node.target for node in results} == {aten.cat.default}
    assert_same(before, after, make, exact=exact)
    assert apply(sink_cat_after_pointwise, before, numerics="strict", **FUSED)[1] == (len(operators) if exact else 0)


@pytest.mark.quick
def test_integers_become_floats_before_they_are_joined():
    make = two(torch.int64, torch.int64)
    before = captured(lambda a, b: torch.tanh(torch.cat([a * 2, b])), make())
    after, count = apply(sink_cat_after_pointwise, before, **FUSED)
    assert count == 1
    assert_same(before, after, make, exact=False)


@pytest.mark.quick
def test_a_pair_sinks_as_one():
    """nan_to_num goes in front of the join, and then relu follows it."""
    before = captured(lambda a, b: torch.relu(torch.nan_to_num(torch.cat([a * 2, b]))), two()())
    after, count = apply(sink_cat_after_pointwise, before, **FUSED)
    assert count == 2
    assert targets(after)[-1] is aten.cat.default
    assert_same(before, after, two())


@pytest.mark.quick
def test_then_the_join_cancels():
    def function(a: Any, b: Any) -> Any:
        first, second = torch.cat([a, b], 1).relu().split([3, 3], 1)
        return first.sum() + second

    before = captured(function, two()())
    after, _ = apply(remove_split_ops_pass, apply(sink_cat_after_pointwise, before)[0])
    assert aten.cat.default not in targets(after)
    assert_same(before, after, two())


@pytest.mark.quick
def test_views_stay_behind_the_join():
    make = two()
    before = captured(lambda a, b: F.relu(torch.stack([a * 2, b], 1).view(4, 3).flatten()), make())
    after, count = apply(sink_cat_after_pointwise, before, **FUSED)
    assert count == 1
    assert targets(after)[-3:] == [aten.stack.default, aten.view.default, aten.reshape.default]
    assert_same(before, after, make)


def no_grad_between(a: Any, b: Any) -> Any:
    joined = torch.cat([a * 2, b])
    with torch.no_grad():
        return joined.relu() + b.sum()


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda a, b: torch.cat([a * 2, b]).tanh(), two(torch.int64, torch.float16)),
        (lambda a, b: torch.cat([a * 2, b]).view(torch.float32).tanh(), two(torch.int32, torch.int32)),
        (no_grad_between, two()),
        (lambda a, b: torch.cat(torch.stack([a * 2, b]).split(1)).relu(), two()),
    ],
    ids=["dtypes differ", "bits", "gradients are switched off between", "a tuple is joined"],
)
@pytest.mark.quick
def test_what_does_not_sink(function, make):
    before = captured(function, make())
    assert apply(sink_cat_after_pointwise, before, **FUSED)[1] == 0
