"""Random numbers in the order of the program, whatever hooks and later passes do to the graph."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.graph.order import PLACE, GraphCycle
from ferrite.graph.regions import is_random
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad import POST_GRAD, eliminate_dead_code
from ferrite.passes.post_grad.random_order import chain_random_ops, note_random_order
from ferrite.pipeline import PassContext, PassFailure, Pipeline, graph_pass, run_pipeline
from tests.compare import assert_same_as_eager

quick = pytest.mark.quick
aten = torch.ops.aten


def draws(graph):
    return [node for node in graph.nodes if is_random(node)]


def swap_first_two(graph):
    """The second draw, with whatever it needs, goes before the first."""
    first, second, *_ = draws(graph)
    needed = [operand for operand in second.all_input_nodes if operand.op == "call_function"]
    for node in (*needed, second):
        first.prepend(node)


def two_draws(x):
    a = torch.rand(3)
    b = torch.rand(3)
    return a - b * x


def two_kinds(x):
    a = torch.rand_like(x)
    b = torch.bernoulli(x.sigmoid())
    return a * 2, b, torch.randn(3)


@pytest.mark.parametrize("hook", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("fn", [two_draws, two_kinds], ids=lambda fn: fn.__name__)
def test_draws_swapped_by_a_hook_still_run_in_program_order(fn, hook):
    swapped = []

    def watched(graph):
        before = draws(graph)
        swap_first_two(graph)
        swapped.append(draws(graph) != before)

    assert_same_as_eager(fn, lambda: [torch.randn(3)], options={hook: watched}, exact=False, calls=2, graphs=1)
    assert swapped == [True]
    assert ferrite.last_compile().rewrites["chain_random_ops"] == 2


def test_without_the_option_a_hook_decides():
    options = {"post_grad_custom_post_pass": swap_first_two, "eager_random_order": False}
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_as_eager(two_draws, lambda: [torch.randn(3)], options=options, exact=False)


def traced(fn, *inputs):
    return make_fx(fn, tracing_mode="fake")(*(inputs or (torch.rand(3),)))


def run(gm, *passes):
    snapshot = Snapshot.of(gm)
    records = run_pipeline(Pipeline("test", passes), gm, PassContext(Options(strict=True)))
    verify_graph(gm, snapshot, deep=True)
    return records


def hook(function, name="hook"):
    return graph_pass(lambda gm: function(gm.graph), name=name)


@quick
def test_names_and_metadata_are_kept():
    gm = traced(two_draws)
    before = {node: (node.name, dict(node.meta)) for node in gm.graph.nodes}
    run(gm, note_random_order, hook(swap_first_two), chain_random_ops)
    assert set(gm.graph.nodes) == set(before)
    for node, (name, meta) in before.items():
        assert node.name == name
        assert {key: node.meta[key] for key in meta} == meta


@quick
def test_later_passes_cannot_swap_them_again():
    gm = traced(two_draws)
    program = draws(gm.graph)
    run(gm, note_random_order, chain_random_ops, hook(swap_first_two, "first"), hook(swap_first_two, "second"))
    assert draws(gm.graph) == program


@quick
def test_unread_draws_stay():
    gm = traced(lambda x: (torch.rand(2), torch.rand(3), x + torch.rand(3))[-1])
    run(gm, note_random_order, hook(swap_first_two), chain_random_ops, eliminate_dead_code)
    assert [node.args[0] for node in draws(gm.graph)] == [[2], [3], [3]]


@quick
@pytest.mark.parametrize("fn", [lambda x: x + 1, lambda x: x + torch.rand(3)])
def test_fewer_than_two_is_nothing(fn):
    gm = traced(fn)
    records = run(gm, note_random_order, chain_random_ops)
    assert not any(record.changed for record in records)
    assert not any(PLACE in node.meta for node in gm.graph.nodes)


@quick
def test_in_order_already_is_no_rewrite_and_a_second_run_changes_nothing():
    gm = traced(two_kinds)
    nodes = list(gm.graph.nodes)
    for _ in range(2):
        records = run(gm, note_random_order, chain_random_ops)
        assert not any(record.changed for record in records)
        assert list(gm.graph.nodes) == nodes


@quick
def test_a_draw_that_a_hook_adds_keeps_its_place():
    def add_between(graph):
        swap_first_two(graph)
        _, second = draws(graph)
        with graph.inserting_before(second):
            graph.call_function(aten.rand.default, ([7],), {"device": torch.device("cpu"), "pin_memory": False})

    gm = traced(two_draws)
    program = draws(gm.graph)
    run(gm, note_random_order, hook(add_between), chain_random_ops)
    first, added, second = draws(gm.graph)
    assert [first, second] == program
    assert added.args == ([7],)


@quick
def test_a_draw_whose_operand_now_comes_late_makes_the_others_wait():
    def fn(x):
        a = torch.bernoulli(x)
        b = torch.rand(3)
        return a, b

    def feed_late(graph):
        first, second = draws(graph)
        with graph.inserting_after(second):
            late = graph.call_function(aten.clamp.default, (first.args[0], 0.0, 1.0))
        first.args = (late,)

    gm = traced(fn)
    program = draws(gm.graph)
    run(gm, note_random_order, hook(feed_late), chain_random_ops)
    assert draws(gm.graph) == program


@quick
def test_draws_that_now_depend_the_other_way_round_are_refused():
    def reverse(graph):
        first, second = draws(graph)
        first.args = (second,)
        second.append(first)

    gm = traced(lambda x: (torch.bernoulli(x), torch.rand(3)))
    with pytest.raises(PassFailure) as caught:
        run(gm, note_random_order, hook(reverse), chain_random_ops)
    assert caught.value.name == "chain_random_ops"
    assert isinstance(caught.value.__cause__, GraphCycle)


@quick
def test_no_read_moves_across_a_write():
    """Going back to the program's order would put the read of x, which needs the second draw, behind the write."""

    def fn(x):
        a = torch.rand(3)
        b = torch.rand(3)
        c = x + b
        aten.copy_.default(x, c)
        return a, c

    def draw_first_last(graph):
        first, _ = draws(graph)
        graph.output_node().prepend(first)

    gm = traced(fn)
    with pytest.raises(PassFailure) as caught:
        run(gm, note_random_order, hook(draw_first_last), chain_random_ops)
    assert "across a write" in str(caught.value.__cause__)


def inside_branches(x):
    def yes(x):
        a = torch.rand(3)
        b = torch.rand(3)
        return a - b * x

    return torch.cond(x.sum() > -1000, yes, lambda x: x.sin(), (x,)) + torch.rand(3)


def test_inside_a_branch():
    swapped = []

    def swap(graph):
        if len(draws(graph)) == 2:
            swap_first_two(graph)
            swapped.append(graph)

    assert_same_as_eager(
        inside_branches, lambda: [torch.randn(3)], options={"post_grad_custom_post_pass": swap}, exact=False
    )
    assert len(swapped) == 2  # the branch, and around it


@quick
def test_the_place_in_the_stage():
    names = [step.name for step in POST_GRAD.passes]
    assert names[0] == "note_random_order"
    assert names.index("chain_random_ops") == names.index("post_grad_custom_post_pass") + 1
