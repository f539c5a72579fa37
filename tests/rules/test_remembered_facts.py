"""What the rewriter remembers of a graph: the same facts while nothing changes, others once something does."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.options import Options
from ferrite.pipeline import PassContext
from ferrite.rewrite.remembered import remembered

pytestmark = pytest.mark.quick


@pytest.fixture
def gm() -> torch.fx.GraphModule:
    return make_fx(lambda x, y: (x.sin() + y).cos(), tracing_mode="fake")(torch.randn(3), torch.randn(3))


def test_nothing_is_gathered_twice(gm):
    context = PassContext(Options())
    known = remembered(gm, context)
    assert known.regions is remembered(gm, context).regions
    assert known.sharing is remembered(gm, context).sharing


def node_of(gm: torch.fx.GraphModule, name: str) -> torch.fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def call_another(gm):
    node_of(gm, "sin").target = torch.ops.aten.tan.default


def read_another(gm):
    node_of(gm, "add").args = (node_of(gm, "sin"), node_of(gm, "sin"))


def add_a_node(gm):
    with gm.graph.inserting_before(node_of(gm, "cos")):
        gm.graph.call_function(torch.ops.aten.exp.default, (node_of(gm, "sin"),))


def erase_a_node(gm):
    node_of(gm, "cos").replace_all_uses_with(node_of(gm, "add"))
    gm.graph.erase_node(node_of(gm, "cos"))


def move_a_node(gm):
    node_of(gm, "y_1").prepend(node_of(gm, "sin"))


def stand_for_another_value(gm):
    node_of(gm, "sin").meta["val"] = node_of(gm, "cos").meta["val"]


def be_written_after(gm):
    node_of(gm, "x_1").meta["written_after"] = True


CHANGES = [
    call_another,
    read_another,
    add_a_node,
    erase_a_node,
    move_a_node,
    stand_for_another_value,
    be_written_after,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(gm, change):
    context = PassContext(Options())
    known = remembered(gm, context)
    change(gm)
    assert remembered(gm, context) is not known


def test_graphs_inside_may_change_unseen(gm):
    gm.add_module("inner", make_fx(lambda x: x.sin())(torch.randn(3)))
    context = PassContext(Options())
    assert remembered(gm, context) is not remembered(gm, context)


def test_another_graph_has_other_facts(gm):
    context = PassContext(Options())
    other = torch.fx.GraphModule(gm, torch.fx.Graph())
    other.graph.graph_copy(gm.graph, {})
    assert remembered(gm, context).regions is not remembered(other, context).regions
