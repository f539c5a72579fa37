"""Views by size become reshapes, which work under any layout chosen later."""

from __future__ import annotations

import pytest
import torch

from ferrite.passes.post_grad.views import reshape_views
from tests.graphs import traced_with_fakes

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def find(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def convolve(x, weight):
    out = aten.convolution(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return out.view(out.shape[0], -1)


def image():
    return torch.rand(2, 3, 6, 6), torch.rand(4, 3, 3, 3)


@pytest.mark.lengthy
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_survives_a_change_of_layout(dynamic):
    gm = traced_with_fakes(convolve, *image(), dynamic=dynamic)
    inputs = image()
    expected = gm(*inputs)
    (view,) = find(gm, aten.view.default)
    shape_env = view.meta["val"].fake_mode.shape_env
    guards, args = len(shape_env.guards), view.args

    (conv,) = find(gm, aten.convolution.default)
    with gm.graph.inserting_after(conv):
        other_layout = gm.graph.call_function(aten.clone.default, (conv,), {"memory_format": torch.channels_last})
    view.replace_input_with(conv, other_layout)
    gm.recompile()
    with pytest.raises(RuntimeError, match="view"):
        gm(*inputs)

    assert reshape_views(gm.graph) == 1
    assert view.target is aten.reshape.default
    assert view.args[1:] == args[1:]
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*inputs), expected)
    assert len(shape_env.guards) == guards
    assert reshape_views(gm.graph) == 0


def test_what_can_be_a_view_still_shares_memory():
    gm = traced_with_fakes(lambda x: x.view(3, 2), torch.rand(6))
    (view,) = find(gm, aten.view.default)
    value = view.meta["val"]
    assert reshape_views(gm.graph) == 1
    gm.recompile()
    x = torch.rand(6)
    out = gm(x)
    assert out.data_ptr() == x.data_ptr()
    assert out.stride() == (2, 1)
    assert view.meta["val"] is value


def test_other_views_stay():
    gm = traced_with_fakes(
        lambda x: (x.view(torch.int32), x.t(), x.unsqueeze(0), x.as_strided([2], [1])), torch.rand(2, 2)
    )
    before = [node.target for node in gm.graph.nodes]
    assert aten.view.dtype in before
    assert reshape_views(gm.graph) == 0
    assert [node.target for node in gm.graph.nodes] == before


def test_a_size_given_by_name():
    gm = traced_with_fakes(lambda x: x.view(3, 2), torch.rand(6))
    (view,) = find(gm, aten.view.default)
    view.args, view.kwargs = view.args[:1], {"size": view.args[1]}
    assert reshape_views(gm.graph) == 1
    gm.recompile()
    assert gm(torch.rand(6)).shape == (3, 2)


def nesting(depth, leaf):
    """A graph that refers to `leaf` twice, under names with dots, through `depth` modules."""
    module = leaf
    for _ in range(depth):
        holder = torch.nn.Module()
        holder.body = module
        root = torch.nn.Module()
        root.inner = holder
        root.again = module
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        bodies = [graph.get_attr("inner.body"), graph.get_attr("again")]
        calls = [graph.call_function(call, (body, x)) for body in bodies]
        graph.output(tuple(calls))
        module = torch.fx.GraphModule(root, graph)
    return module


def call(body, x):
    return body(x)


@pytest.mark.parametrize("depth", [1, 2])
def test_nested_graphs_are_visited_once_each(depth):
    leaf = traced_with_fakes(lambda x: x.view(3, 2).view(6), torch.rand(6))
    gm = nesting(depth, leaf)
    x = torch.rand(6)
    expected = gm(x)
    assert reshape_views(gm.graph) == 2
    assert len(find(leaf, aten.reshape.default)) == 2
    assert "reshape" in leaf.code  # its own text is what runs
    assert str(gm(x)) == str(expected)
    assert reshape_views(gm.graph) == 0


def test_a_traced_branch():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.view(3, 2).sin(), lambda x: x.view(3, 2).cos(), (x,))

    gm = traced_with_fakes(fn, torch.rand(6))
    x = torch.rand(6)
    expected = gm(x)
    assert reshape_views(gm.graph) == 2
    assert torch.equal(gm(x), expected)


def test_a_graph_without_a_module_and_attributes_that_are_no_graphs():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.view.default, (x, [6])))
    assert reshape_views(graph) == 1

    root = torch.nn.Module()
    root.register_buffer("weight", torch.rand(6))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(aten.view.default, (graph.get_attr("weight"), [3, 2])))
    gm = torch.fx.GraphModule(root, graph)
    assert reshape_views(gm.graph) == 1
