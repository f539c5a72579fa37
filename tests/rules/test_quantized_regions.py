"""Quantised regions: what `InvokeQuant` captures is brought to a form without objects, in inference and training."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._higher_order_ops import InvokeQuant, invoke_quant, invoke_quant_packed

import ferrite
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes import joint_graph_passes
from ferrite.passes.joint import canonicalize_quant_mapping
from tests.compare import assert_same_as_eager, compile_strict

pytestmark = pytest.mark.quick
NAME = "canonicalize_quant_mapping"


def region(*, results: int = 1, **options):
    call = InvokeQuant(**options)

    def inner(a, b):
        c = (a * 2).sin() @ b
        return c if results == 1 else (c, c.relu())

    def function(a, b):
        found = call(inner, a, b, scheme="nf4")
        return found + 1 if results == 1 else found[0] + found[1]

    return function


def floats(*, gradient=False):
    return [torch.rand(4, 4, requires_grad=gradient), torch.rand(4, 4, requires_grad=gradient)]


def seen_by_a_hook(function, inputs):
    """The nodes of the joint graph that call something, as the first users' pass sees them."""
    found = []

    def hook(graph):
        if graph.find_nodes(op="call_function", target=invoke_quant):
            found.append([node for node in graph.nodes if node.op == "call_function"])

    compile_strict(function, options={"joint_custom_pre_pass": hook})(*inputs)
    (calls,) = found
    return calls


def test_options_become_metadata_and_one_result_no_tuple():
    call, add = seen_by_a_hook(region(codegen_low_precision=False), floats())
    assert call.target is invoke_quant
    assert call.kwargs == {"scheme": "nf4"}
    assert call.meta["quant_options"] == InvokeQuant(codegen_low_precision=False)
    assert add.args[0] is call


def test_several_results_stay_a_tuple():
    call, *rest = seen_by_a_hook(region(results=2), floats())
    assert call.target is invoke_quant
    assert [node.target for node in rest[:2]] == [operator.getitem] * 2


@pytest.mark.lengthy
@pytest.mark.parametrize("skipped", [False, True])
def test_training_is_cut_around_the_regions(skipped):
    """Also with the options in the graph, which is no tensor that could be saved."""
    skip = [NAME] if skipped else []
    assert_same_as_eager(region(), lambda: floats(gradient=True), backward=True, options={"skip": skip})
    fired = ferrite.last_compile().rewrites.get(NAME, 0)
    assert fired == (0 if skipped else 2), "one region forward, one backward"


@pytest.mark.parametrize("results", [1, 2])
def test_inference_computes_the_same(results):
    with torch.no_grad():
        assert_same_as_eager(region(results=results), floats)
    assert ferrite.last_compile().rewrites[NAME] == 1


def by_hand(calls: int, *, options=True):
    """A graph that calls one region several times, each time reading its one result."""
    with torch._subclasses.FakeTensorMode() as mode:
        x = torch.rand(3)
    inner = torch.fx.Graph()
    given = inner.placeholder("x")
    given.meta["val"] = x
    sine = inner.call_function(torch.ops.aten.sin.default, (given,))
    with mode:
        sine.meta["val"] = x.sin()
    inner.output((sine,))
    root = torch.nn.Module()
    root.body = torch.fx.GraphModule({}, inner)
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = x
    body = graph.get_attr("body")
    made = graph.call_function(InvokeQuant, ()) if options else None
    results = []
    for _ in range(calls):
        named = {"quant_options": made} if made is not None else {}
        call = graph.call_function(invoke_quant_packed, (body, value), named)
        with mode:
            call.meta["val"] = (x.sin(),)
        results.append(graph.call_function(operator.getitem, (call, 0)))
        results[-1].meta["val"] = call.meta["val"][0]
    if made is not None:
        made.meta["val"] = None
    graph.output(tuple(results))
    return torch.fx.GraphModule(root, graph)


@pytest.mark.parametrize("options", [True, False])
def test_a_region_that_is_called_twice_keeps_its_results(options):
    gm = by_hand(2, options=options)
    joint_graph_passes(gm, is_inference=True, options=Options(strict=True))
    verify_graph(gm, deep=True)
    calls = gm.graph.find_nodes(op="call_function", target=invoke_quant)
    assert len(calls) == 2
    assert not gm.graph.find_nodes(op="call_function", target=InvokeQuant)
    assert [call.meta.get("quant_options") for call in calls] == [InvokeQuant() if options else None] * 2
    x = torch.rand(3)
    assert all(torch.equal(result, x.sin()) for result in gm(x))


def test_options_that_are_computed_stay():
    gm = by_hand(1)
    (made,) = gm.graph.find_nodes(op="call_function", target=InvokeQuant)
    (value,) = gm.graph.find_nodes(op="placeholder")
    made.args = (value,)
    before = str(gm.graph)
    canonicalize_quant_mapping(gm)
    assert str(gm.graph) == before
