"""Dead calls go, effects stay; calls that compute what they are given, in every overload."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.values import mode_of
from ferrite.options import Options
from ferrite.passes import post_grad_passes
from ferrite.passes.post_grad import eliminate_dead_code, remove_noop_ops
from ferrite.pipeline import PassContext, Pipeline, run_pipeline
from ferrite.rewrite import Writer, why
from tests.graphs import assert_same_computation, operators

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def traced(function, *inputs, mode="fake"):
    return make_fx(function, tracing_mode=mode)(*(inputs or (torch.rand(3),)))


def run(gm, *steps):
    records = run_pipeline(Pipeline("test", steps), gm, PassContext(Options(strict=True)))
    return sum(sum(record.rewrites.values()) for record in records)


# --- dead code --------------------------------------------------------------------------------------------------------


def with_unread(write, *inputs):
    """x + 1 behind calls that nobody reads: `write(call, x)` makes them, since tracing leaves them out."""
    gm = traced(lambda x, *rest: x + 1, *(inputs or (torch.rand(3),)))
    place = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    with gm.graph.inserting_before(place):
        write(Writer(gm.graph, mode_of(gm.graph)).call, *gm.graph.find_nodes(op="placeholder"))
    gm.recompile()
    return gm


def chain_of_three(call, x):
    call(aten.exp.default, call(aten.cos.default, call(aten.sin.default, x)))


def unread_memory(call, x):
    call(aten.empty.memory_format, [4], device=torch.device("cpu"))


@pytest.mark.parametrize(("write", "count"), [(chain_of_three, 3), (unread_memory, 1)], ids=["chain", "empty"])
def test_what_nobody_reads_goes(write, count):
    gm = with_unread(write)
    before = copy.deepcopy(gm)
    assert len(operators(gm)) == count + 1
    assert run(gm, eliminate_dead_code) == count
    assert operators(gm) == ["add.Tensor"]
    assert_same_computation(before, gm, lambda: [torch.rand(3)], exact=True)
    assert run(gm, eliminate_dead_code) == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda call, x: call(aten.copy_.default, x, call(aten.sin.default, x)),
        lambda call, x: call(aten.add_.Tensor, call(aten.view.default, x, [3, 1]), 1),
        lambda call, x: call(aten.rand.default, [3], device=torch.device("cpu")),
        lambda call, x: call(aten.bernoulli.default, x),
        lambda call, x: call(aten._assert_async.default, call(aten.any.default, x)),
    ],
    ids=["a copy into an input", "a write through a view", "a draw", "a draw from an operand", "an assertion"],
)
def test_effects_stay_with_what_they_read(write):
    gm = with_unread(write)
    before, names = copy.deepcopy(gm), operators(gm)
    assert run(gm, eliminate_dead_code) == 0
    assert operators(gm) == names
    assert_same_computation(before, gm, lambda: [torch.rand(3)], exact=True)


def test_dead_calls_inside_a_branch_go():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    gm = traced(function)
    branch = next(each for each in gm.children() if isinstance(each, torch.fx.GraphModule))
    end = branch.graph.output_node()
    with branch.graph.inserting_before(end):
        Writer(branch.graph, mode_of(gm.graph)).call(aten.exp.default, branch.graph.find_nodes(op="placeholder")[0])
    assert "exp.default" in operators(branch)
    assert run(gm, eliminate_dead_code) == 1
    assert not any("exp.default" in operators(each) for each in gm.children())


def test_an_unread_reader_keeps_no_rule_from_firing():
    gm = traced(lambda a, b, c: a @ b + c, *(torch.rand(shape) for shape in ((3, 4), (4, 5), (5,))))
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    with gm.graph.inserting_after(product):
        Writer(gm.graph, mode_of(gm.graph)).call(aten.relu.default, product)
    post_grad_passes(gm, options=Options(strict=True))
    assert operators(gm) == ["addmm.default"]


def test_the_last_write_to_an_input_of_an_inference_graph_stays():
    def function(x):
        x.copy_(x * 2)
        return x.sum()

    gm = traced(function)
    before = copy.deepcopy(gm)
    post_grad_passes(gm, is_inference=True, options=Options(strict=True))
    assert_same_computation(before, gm, lambda: [torch.rand(3)], exact=True)


# --- calls that compute what they are given ---------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [0, 2, -1])
@pytest.mark.parametrize("by_name", [False, True])
def test_rounding_to_decimals_is_an_overload_like_others(decimals, by_name):
    gm = traced(lambda x: aten.round.decimals(x, decimals=decimals) + 1, torch.rand(4) * 100)
    before = copy.deepcopy(gm)
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.round.decimals)
    if by_name:
        call.args, call.kwargs = (), {"self": call.args[0], "decimals": decimals}
    remove_noop_ops(gm)
    assert operators(gm) == ["round.decimals", "add.Tensor"]
    assert_same_computation(before, gm, lambda: [torch.rand(4) * 100], exact=True)


def test_a_copy_into_pinned_memory_is_there_for_the_pinning():
    gm = traced(lambda x: aten.copy.default(x.new_empty(4), x.sin()) + 1, torch.rand(4))
    (memory,) = (node for node in gm.graph.nodes if str(node.target).startswith("aten.new_empty"))
    (copied,) = gm.graph.find_nodes(op="call_function", target=aten.copy.default)
    (rule,) = (rule for rule in remove_noop_ops.rules if rule.name == "copy_noop")
    assert [miss.reason for miss in why(gm, rule)] == [""]
    memory.kwargs = {**memory.kwargs, "pin_memory": True}
    assert copied.args[0] is memory
    assert [miss.reason for miss in why(gm, rule)] == ["it is there for the pinned memory"]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_branch_that_returns_one_tensor(mode):
    """Outputs of nested graphs need not be tuples."""
    gm = traced(lambda x: aten.clone.default(aten.clone.default(x).sin()), torch.rand(4), mode=mode)
    assert not isinstance(gm.graph.output_node().args[0], (tuple, list))
    before = copy.deepcopy(gm)
    remove_noop_ops(gm)
    assert operators(gm) == ["sin.default"]
    assert_same_computation(before, gm, lambda: [torch.rand(4)], exact=True)
