"""The order of nodes: made valid, made local."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.order import GraphCycle, reorder_for_locality, stable_topological_sort

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def names(graph):
    return [node.name for node in graph.nodes]


def random_graph(seed, count=60):
    """A valid graph whose nodes take one to three operands, some inside lists and keywords."""
    pick = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(count):
        kind = pick.randrange(3)
        if kind == 0:
            made = graph.call_function(aten.sin.default, (pick.choice(nodes),))
        elif kind == 1:
            made = graph.call_function(aten.cat.default, ([pick.choice(nodes), pick.choice(nodes)],))
        else:
            made = graph.call_function(aten.add.Tensor, (pick.choice(nodes),), {"other": pick.choice(nodes)})
        nodes.append(made)
    graph.output((nodes[-1], nodes[-2]))
    return graph


def shuffle(graph, seed):
    nodes = [node for node in graph.nodes if node.op != "output"]
    random.Random(seed).shuffle(nodes)
    first = next(iter(graph.nodes))
    for node in nodes:
        if node is not first:
            first.prepend(node)


def is_valid(graph):
    seen = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


@pytest.mark.parametrize("seed", range(10))
def test_a_valid_order_is_kept(seed):
    graph = random_graph(seed)
    before = names(graph)
    assert not stable_topological_sort(graph)
    assert names(graph) == before


@pytest.mark.parametrize("seed", range(10))
def test_a_shuffled_graph_becomes_valid(seed):
    graph = random_graph(seed)
    shuffle(graph, seed)
    assert not is_valid(graph)
    assert stable_topological_sort(graph)
    assert is_valid(graph)
    assert list(graph.nodes)[-1].op == "output"
    graph.lint()
    assert not stable_topological_sort(graph)


def test_a_node_goes_right_behind_its_last_operand_and_others_stay():
    gm = make_fx(lambda x: (x.sin(), x.cos(), x.exp(), x.tan()))(torch.rand(3))
    nodes = {node.name: node for node in gm.graph.nodes}
    with gm.graph.inserting_before(nodes["sin"]):
        early = gm.graph.call_function(aten.cat.default, ([nodes["cos"], nodes["sin"]],))
        later = gm.graph.call_function(aten.add.Tensor, (early,), {"other": nodes["cos"]})
    assert stable_topological_sort(gm.graph)
    assert names(gm.graph)[1:] == ["sin", "cos", early.name, later.name, "exp", "tan", "output"]


def test_the_output_stays_last():
    gm = make_fx(lambda x: x.sin())(torch.rand(3))
    output = list(gm.graph.nodes)[-1]
    with gm.graph.inserting_after(output):
        gm.graph.call_function(aten.exp.default, (next(iter(gm.graph.nodes)),))
    assert stable_topological_sort(gm.graph)
    assert names(gm.graph)[1:] == ["sin", "exp_default", "output"]


def test_a_cycle_is_named_and_nothing_moves():
    gm = make_fx(lambda x: x.sin().cos().exp().tan())(torch.rand(3))
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["sin"].args = (nodes["exp"],)
    before = names(gm.graph)
    with pytest.raises(GraphCycle, match="wait for each other") as caught:
        stable_topological_sort(gm.graph)
    assert {node.name for node in caught.value.nodes} == {"sin", "cos", "exp"}
    assert names(gm.graph) == before


def test_an_operand_of_another_graph_is_an_error():
    gm, other = (make_fx(lambda x: x.sin())(torch.rand(3)) for _ in range(2))
    sin = list(gm.graph.nodes)[1]
    sin.args = (list(other.graph.nodes)[1],)
    with pytest.raises(GraphCycle, match="not in the graph"):
        stable_topological_sort(gm.graph)


def test_sorting_is_linear(monkeypatch):
    """Each node's operands are asked for a fixed number of times, also where everything waits for one node."""
    graph = torch.fx.Graph()
    first = graph.placeholder("x")
    for _ in range(200):
        graph.call_function(aten.sin.default, (first,))
    nodes = list(graph.nodes)
    last = graph.call_function(aten.cat.default, (nodes[1:],))
    graph.output(last)
    nodes[1].prepend(last)
    asked = []
    original = torch.fx.Node.all_input_nodes.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.fx.Node, "all_input_nodes", property(lambda self: asked.append(self) or original(self)))
    assert stable_topological_sort(graph)
    assert len(asked) <= len(graph.nodes)


def moved(fn, *inputs):
    gm = make_fx(fn)(*inputs)
    count = reorder_for_locality(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, count


def test_producers_move_to_their_earliest_user():
    def fn(x):
        a = x.sin()
        b = x.cos()
        c = b.exp()
        d = c + 1
        return a * d

    x = torch.rand(3)
    gm, count = moved(fn, x)
    # The second operand's chain is the nearest; the first operand, with nothing to wait for, stands before it.
    assert names(gm.graph)[1:] == ["sin", "cos", "exp", "add", "mul", "output"]
    assert count == 0
    assert torch.equal(gm(x), fn(x))


def test_a_value_needed_late_is_made_late():
    def fn(x):
        a = x.sin()
        b = x.cos()
        c = b.exp()
        return c + 1, a * 2

    x = torch.rand(3)
    gm, count = moved(fn, x)
    assert names(gm.graph)[1:] == ["cos", "exp", "add", "sin", "mul", "output"]
    assert count > 0
    assert all(map(torch.equal, gm(x), fn(x)))


def test_random_draws_stay():
    def fn(x):
        a = torch.rand_like(x)
        b = torch.rand_like(x)
        c = b + 1
        return c, a + 1

    gm, _ = moved(fn, torch.rand(3))
    draws = [node for node in gm.graph.nodes if node.name.startswith("rand_like")]
    assert [draw.name for draw in draws] == ["rand_like", "rand_like_1"]
    assert names(gm.graph)[1:3] == ["rand_like", "rand_like_1"]


def test_nothing_crosses_a_write():
    def fn(x, y):
        a = x.sin()
        b = y.view(-1)
        y.add_(1)
        return b.exp(), a.cos()

    gm, _ = moved(fn, torch.rand(3), torch.rand(3))
    order = names(gm.graph)
    assert order.index("sin") < order.index("add_")
    assert order.index("view") < order.index("add_")


def test_the_writes_at_the_end_and_what_follows_them_are_left_alone():
    def fn(x, y):
        a = x.sin()
        b = x.cos()
        c = b + 1
        x.copy_(c)
        d = y.exp()
        e = y.tan()
        return e + 1, d + 1, a

    gm, _ = moved(fn, torch.rand(3), torch.rand(3))
    order = names(gm.graph)
    assert order[order.index("copy_") :] == ["copy_", "exp", "tan", "add_1", "add_2", "output"]
    assert order.index("sin") < order.index("copy_")


def test_what_a_wait_waits_for_stays():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    other = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "max", "0"))
    wait_other = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (other,))
    work = graph.call_function(aten.sin.default, (x,))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    graph.output((graph.call_function(aten.exp.default, (work,)), wait, wait_other))
    reorder_for_locality(graph)
    graph.lint()
    order = list(graph.nodes)
    assert order[1:3] == [start, other]


def test_items_of_a_tuple_stay():
    gm, _ = moved(lambda x: tuple(part + 1 for part in reversed(x.split(1))), torch.rand(3))
    items = [node.args[1] for node in gm.graph.nodes if node.target is operator.getitem]
    assert items == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_reordering_keeps_the_graph_valid_and_is_done_after_one_run(seed):
    graph = random_graph(seed)
    count = reorder_for_locality(graph)
    graph.lint()
    order = names(graph)
    assert count > 0
    assert reorder_for_locality(graph) == 0
    assert names(graph) == order


def test_an_empty_graph_has_nothing_to_order():
    graph = torch.fx.Graph()
    assert reorder_for_locality(graph) == 0
    assert not stable_topological_sort(graph)
