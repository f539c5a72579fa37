"""Linear layers that read one tensor: grouped, or joined by rows for int4 weights. On graphs built by hand."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ferrite.graph.values import compute, mode_of
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad import operators as own_operators
from ferrite.passes.post_grad.grouped_linear import (
    INT4_LINEAR,
    PACK_INT4,
    concat_linear_woq_int4,
    grouped_gemm_pass,
    unpacked,
)
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline
from tests.graphs import target_names

pytestmark = pytest.mark.quick
aten = torch.ops.aten
packed = pytest.mark.skipif(own_operators.PACKED_LINEAR is None, reason="this torch has no packed linear layer")


def context(fuel: int | None = None, **more: Any) -> PassContext:
    asked = {"cpu_grouped_gemm": True, "cpu_concat_linear": True, "max_autotune": True}
    options: Any = types.SimpleNamespace(**{**vars(Options(strict=True)), **asked, **more})
    return PassContext(options, fuel=Fuel(fuel))


def run(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], set[tuple[int, int]]]:
    own = [x.clone() for x in inputs]
    outputs = pytree.tree_leaves(gm(*own))
    storages = [tensor.untyped_storage()._cdata for tensor in (*own, *outputs)]
    return outputs, {(i, j) for i, a in enumerate(storages) for j, b in enumerate(storages) if i < j and a == b}


def trace(function: Any, inputs: list[torch.Tensor], mode: str = "fake") -> torch.fx.GraphModule:
    """Tensors that the function holds itself become constants of the module."""
    gm = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"], _ = compute(node, mode_of(gm.graph))
    return gm


def assert_merged(step: Any, function: Any, inputs: list[torch.Tensor], count: int, mode: str = "fake") -> Any:
    """Trace, run the pass, compare everything, run it again."""
    before = trace(function, inputs, mode)
    after = copy.deepcopy(before)
    snapshot, text = Snapshot.of(after), str(after.graph)
    own = context()
    assert step.function(after, own) == count
    assert own.rewrites.get(step.name, 0) == count
    assert (str(after.graph) == text) == (count == 0)
    verify_graph(after, snapshot, deep=True)
    (old, old_pairs), (new, new_pairs) = run(before, inputs), run(after, inputs)
    assert new_pairs == old_pairs
    for mine, theirs in zip(new, old, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert step.function(after, context()) == 0
    return after


# --- packed layers ----------------------------------------------------------------------------------------------------


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, attr: str = "none") -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, b, attr, [], "")


def layers(count: int, rows: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(4, 16), *(torch.rand(rows, 16) for _ in range(count))]


@packed
@pytest.mark.parametrize(("count", "fires"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_layers_on_one_input_become_a_group(count, fires, mode):
    x, *weights = layers(count)
    gm = assert_merged(grouped_gemm_pass, lambda x: [linear(x, w) for w in weights], [x], int(fires), mode)
    assert target_names(gm).count("ferrite.grouped_linear.default") == int(fires)
    assert target_names(gm).count("mkldnn._linear_pointwise.default") == (0 if fires else count)


@packed
def test_each_layer_has_a_bias_or_not():
    inputs = [*layers(3), torch.rand(8)]
    assert_merged(grouped_gemm_pass, lambda x, u, v, w, b: [linear(x, u, b), linear(x, v), linear(x, w, b)], inputs, 1)


@packed
def test_inputs_of_three_dimensions_are_grouped_too():
    inputs = [torch.rand(2, 3, 16), *layers(2)[1:]]
    assert_merged(grouped_gemm_pass, lambda x, v, w: [linear(x, v), linear(x, w)], inputs, 1)


@packed
@pytest.mark.parametrize("first", [False, True])
def test_another_user_of_the_input_keeps_them_apart(first):
    def function(x, v, w):
        early = [x.relu()] if first else []
        return [*early, linear(x, v), linear(x, w), x.relu()]

    assert_merged(grouped_gemm_pass, function, layers(2), 0)


@packed
def test_an_input_that_is_returned_has_another_user():
    assert_merged(grouped_gemm_pass, lambda x, v, w: [(y := x.neg()), linear(y, v), linear(y, w)], layers(2), 0)


@packed
def test_equal_weights_other_sizes_and_what_goes_on_stay():
    assert_merged(grouped_gemm_pass, lambda x, w: [linear(x, w), linear(x, w)], layers(1), 0)
    assert_merged(grouped_gemm_pass, lambda x, v, w: [linear(x, v), linear(x, w)], [*layers(1), torch.rand(9, 16)], 0)
    assert_merged(grouped_gemm_pass, lambda x, v, w: [linear(x, v, None, "relu"), linear(x, w)], layers(2), 0)


@packed
def test_sizes_that_may_differ_stay():
    assert_merged(
        grouped_gemm_pass, lambda x, v, w: [linear(x, v), linear(x, w)], [*layers(1), torch.rand(9, 16)], 0, "symbolic"
    )


@packed
def test_a_weight_that_is_computed_late_is_waited_for():
    def between(x, v, w):
        y = linear(x, v)
        return [y.neg(), linear(x, w)]

    def computed(x, v, w):
        y = linear(x, v)
        late = w.neg()
        return [linear(x, late), y.neg()]

    def read_before(x, v, w):
        y = linear(x, v).neg()
        return [linear(x, w + y.sum()), y]

    assert_merged(grouped_gemm_pass, between, layers(2), 1)
    assert_merged(grouped_gemm_pass, computed, layers(2), 1)
    assert_merged(grouped_gemm_pass, read_before, layers(2), 0)


@packed
def test_layers_on_both_sides_of_a_write_stay():
    def function(x, v, w):
        y = linear(x, v)
        w.mul_(2)
        return [y, linear(x, w)]

    gm = make_fx(function, tracing_mode="fake")(*layers(2))
    assert grouped_gemm_pass.function(gm, context()) == 0


@packed
def test_items_have_metadata_and_origin():
    gm = make_fx(lambda x, v, w: [linear(x, v), linear(x, w)], tracing_mode="fake")(*layers(2))
    for number, node in enumerate(gm.graph.nodes):
        node.meta["stack_trace"] = f'File "model.py", line {number}, in forward'
    traces = [node.meta["stack_trace"] for node in gm.graph.nodes if node.op == "call_function"]
    run_pipeline(Pipeline("alone", (grouped_gemm_pass,)), gm, context())
    items = [node for node in gm.graph.nodes if node.name.startswith("getitem")]
    assert [node.meta["stack_trace"] for node in items] == traces
    assert all(node.meta["val"].shape == (4, 8) for node in items)
    assert all(node.meta["rewritten"][0] == "grouped_gemm_pass" for node in items)


@packed
def test_the_operator_is_a_good_citizen():
    x, *weights = layers(2)
    torch.library.opcheck(torch.ops.ferrite.grouped_linear.default, (x, weights, [torch.rand(8), None]))


@pytest.mark.parametrize("there", [pytest.param(True, marks=packed), False])
def test_the_operator_computes_what_the_layers_do(monkeypatch, there):
    if not there:
        monkeypatch.setattr(own_operators, "PACKED_LINEAR", None)
    x, v, w = layers(2)
    bias = torch.rand(8)
    first, second = torch.ops.ferrite.grouped_linear(x, [v, w], [bias, None])
    torch.testing.assert_close(first, torch.nn.functional.linear(x, v, bias))
    torch.testing.assert_close(second, torch.nn.functional.linear(x, w))


@packed
def test_it_is_off_unless_asked_for_and_fuel_counts():
    gm = make_fx(lambda x, v, w: [linear(x, v), linear(x, w)], tracing_mode="fake")(*layers(2))
    for off in ({"cpu_grouped_gemm": False}, {"max_autotune": False}):
        assert grouped_gemm_pass.function(gm, context(**off)) == 0
    assert grouped_gemm_pass.function(gm, context(fuel=0)) == 0
    assert concat_linear_woq_int4.function(gm, PassContext(Options())) == 0


# --- int4 layers ------------------------------------------------------------------------------------------------------


class Projections(torch.nn.Module):
    """Layers with int4 weights on one input or several: (input, weight, group) for each."""

    def __init__(self, plan: list[tuple[int, int, int]], rows: tuple[int, ...] = (32, 64, 32), features: int = 64):
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.numbers = [torch.randint(0, 16, (n, features), dtype=torch.int32) for n in rows]
        for index, number in enumerate(self.numbers):
            self.register_buffer(f"w{index}", PACK_INT4(number, 2))
        for index, (_, weight, group) in enumerate(plan):
            self.register_buffer(f"s{index}", torch.rand(features // group, rows[weight], 2))

    def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        return [
            INT4_LINEAR(xs[x], getattr(self, f"w{weight}"), group, getattr(self, f"s{index}"))
            for index, (x, weight, group) in enumerate(self.plan)
        ]


def activations(count: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(5, 64) for _ in range(count)]


@pytest.mark.parametrize("rows", [32, 64, 96])
@pytest.mark.parametrize("group", [32, 64])
def test_unpacking_gives_back_the_numbers(rows, group):
    numbers = torch.randint(0, 16, (rows, 64), dtype=torch.int32)
    assert torch.equal(unpacked(PACK_INT4(numbers, 2), group), numbers)


@pytest.mark.parametrize(("count", "fires"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("group", [32, 64])
def test_projections_become_one(count, fires, group):
    module = Projections([(0, weight, group) for weight in range(count)])
    gm = assert_merged(concat_linear_woq_int4, module, activations(), int(fires))
    assert target_names(gm).count("aten._weight_int4pack_mm_for_cpu.default") == 1
    assert target_names(gm).count("aten.clone.default") == (count if fires else 0)
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    assert len(read) == 2, "the constants of before are not read any more"


def test_two_groups_that_begin_with_one_weight_have_constants_of_their_own():
    module = Projections([(0, 0, 32), (0, 1, 32), (1, 0, 32), (1, 2, 32)])
    gm = assert_merged(concat_linear_woq_int4, module, activations(2), 2)
    weights = [str(node.target) for node in gm.graph.nodes if node.op == "get_attr"]
    assert len(weights) == len(set(weights)) == 4


def test_what_cannot_be_joined_stays():
    assert_merged(concat_linear_woq_int4, Projections([(0, 0, 32), (0, 1, 64)]), activations(), 0)
    assert_merged(concat_linear_woq_int4, Projections([(0, 0, 32), (0, 0, 32)]), activations(), 0)
    module = Projections([(0, 0, 32), (0, 1, 32)])
    assert_merged(concat_linear_woq_int4, lambda x: [x.relu(), *module(x)], activations(), 0)


def test_strict_numerics_keep_layers_apart():
    """A wider weight may be taken in other blocks."""
    gm = trace(Projections([(0, 0, 32), (0, 1, 32)]), activations())
    assert concat_linear_woq_int4.function(gm, context(numerics="strict")) == 0
    assert concat_linear_woq_int4.function(gm, context()) == 1


def test_weights_that_are_inputs_stay():
    module = Projections([(0, 0, 32), (0, 1, 32)])

    def function(x, v, w):
        return [INT4_LINEAR(x, v, 32, module.s0), INT4_LINEAR(x, w, 32, module.s1)]

    assert_merged(concat_linear_woq_int4, function, [*activations(), module.w0, module.w1], 0)


def test_joined_layers_can_be_taken_back():
    """The constants of before stay on the module, so that a graph of before still runs."""
    module, inputs = Projections([(0, 0, 32), (0, 1, 32)]), activations()
    gm = trace(module, inputs)
    before = copy.deepcopy(gm.graph)
    expected = gm(*inputs)
    assert concat_linear_woq_int4.function(gm, context()) == 1
    gm.graph = before
    assert all(map(torch.equal, gm(*inputs), expected))
