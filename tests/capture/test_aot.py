"""What capture hands to the compiler: one graph per direction, with facts about its inputs and outputs."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch

import ferrite
from ferrite.capture import CapturedGraph, GraphKind, capture
from ferrite.capture.decompositions import SPELLINGS, decompositions
from ferrite.options import Options
from ferrite.runtime import run_in_eager
from tests.compare import assert_same_as_eager

pytestmark = pytest.mark.quick


def capturing(graphs: list[CapturedGraph], **settings):
    """A backend that keeps the captured graphs and runs them in eager."""

    def compile_graph(graph):
        graphs.append(graph)
        return run_in_eager(graph.gm)

    def backend(gm, example_inputs):
        return capture(gm, example_inputs, compile_graph, Options(**settings))

    return backend


def operators(graph: CapturedGraph) -> list[str]:
    return [str(node.target) for node in graph.gm.graph.nodes if node.op == "call_function"]


def test_inference_compiles_one_graph():
    graphs: list[CapturedGraph] = []
    model = torch.nn.Linear(3, 4)
    with torch.no_grad():
        torch.compile(model, backend=capturing(graphs))(torch.ones(2, 3))
    (graph,) = graphs
    assert graph.kind is GraphKind.INFERENCE
    assert "aten.addmm.default" in operators(graph)


def test_training_compiles_the_backward_graph_when_it_is_needed():
    graphs: list[CapturedGraph] = []
    out = torch.compile(torch.nn.Linear(3, 4), backend=capturing(graphs))(torch.ones(2, 3))
    assert [graph.kind for graph in graphs] == [GraphKind.FORWARD]
    out.sum().backward()
    assert [graph.kind for graph in graphs] == [GraphKind.FORWARD, GraphKind.BACKWARD]


def test_parameters_and_buffers_are_static_inputs():
    graphs: list[CapturedGraph] = []
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.compile(model, backend=capturing(graphs))(torch.ones(2, 3))
    (graph,) = graphs
    placeholders = [node.meta["val"] for node in graph.gm.graph.nodes if node.op == "placeholder"]
    shapes = sorted(tuple(placeholders[index].shape) for index in graph.static_inputs)
    assert shapes == sorted([(4, 3), (4,), (4,), (4,), (4,), (4,), ()])
    assert len(placeholders) == len(graph.static_inputs) + 1  # the user's input is not static


def test_saved_intermediates_are_donated_and_inputs_are_not():
    graphs: list[CapturedGraph] = []
    x = torch.randn(2, 3, requires_grad=True)
    torch.compile(lambda x: (x.exp().sin() * x).sum(), backend=capturing(graphs, partition="save-all"))(x).backward()
    backward = graphs[1]
    names = [node.name for node in backward.gm.graph.nodes if node.op == "placeholder"]
    donated = {names[index] for index in backward.donated_inputs}
    assert donated
    assert not any(name.startswith(("primals", "tangents")) for name in donated)


def test_output_strides_are_those_of_the_user():
    graphs: list[CapturedGraph] = []
    torch.compile(lambda x: (x.t() + 1, x.sum()), backend=capturing(graphs))(torch.ones(2, 3))
    assert graphs[0].output_strides == ((1, 3), ())


def test_saved_values_have_no_wanted_strides():
    graphs: list[CapturedGraph] = []
    torch.compile(lambda x: x.exp(), backend=capturing(graphs))(torch.ones(2, 3, requires_grad=True))
    outputs = graphs[0].gm.graph.output_node().args[0]
    assert len(graphs[0].output_strides) == len(outputs) > 1
    assert graphs[0].output_strides == ((3, 1), *(None,) * (len(outputs) - 1))


def test_mutated_inputs_are_written_inside_the_graph():
    graphs: list[CapturedGraph] = []
    x = torch.zeros(3)
    torch.compile(lambda x: x.add_(1).sum(), backend=capturing(graphs))(x)
    assert operators(graphs[0])[-1] == "aten.copy_.default"
    assert torch.equal(x, torch.ones(3))


def test_spelling_keeps_fused_operators_whole_and_unifies_views():
    graphs: list[CapturedGraph] = []

    def fn(x):
        return torch.nn.functional.silu(x).t().squeeze(0), x.transpose(0, 1)

    torch.compile(fn, backend=capturing(graphs))(torch.ones(2, 3))
    found = set(operators(graphs[0]))
    assert "aten.silu.default" in found
    assert "aten.permute.default" in found
    assert not found & {str(operator) for operator in SPELLINGS}


def test_core_takes_operators_apart():
    graphs: list[CapturedGraph] = []
    torch.compile(torch.nn.functional.silu, backend=capturing(graphs, decompose="core"))(torch.ones(2))
    assert "aten.silu.default" not in operators(graphs[0])
    assert set(decompositions("spelling")) == set(SPELLINGS)
    assert len(decompositions("core")) > 200


@pytest.mark.parametrize("fn", [lambda x: x.roll(1, 2), lambda x: torch.xlogy(x, x.contiguous())])
@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_decompositions_keep_the_memory_format(fn, decompose):
    inputs = functools.partial(torch.rand, 2, 4, 6, 6)
    assert_same_as_eager(fn, lambda: [inputs().to(memory_format=torch.channels_last)], options={"decompose": decompose})


@pytest.mark.lengthy
@pytest.mark.parametrize("executor", ["native", "calls"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_output_that_a_decomposition_restrides_is_copied_back(dynamic, executor):
    def fn(x):
        return torch.baddbmm(x[:, 0], x[:, 0], x[:, 1])

    def make_inputs():
        return [torch.rand(2, 4, 6, 6).transpose(0, 3).contiguous().transpose(0, 3)]

    assert_same_as_eager(fn, make_inputs, options={"decompose": "core", "executor": executor}, dynamic=dynamic)
    (graph,) = ferrite.last_compile().graphs
    copied = {
        "native": any("output" in kernel.operators for kernel in graph.kernels),
        "calls": "output" in [call.operator for call in graph.eager_calls],
    }
    assert copied[executor]


@pytest.mark.lengthy
def test_min_cut_saves_less_than_save_all():
    def fn(x):
        return x.sin().cos().sin().cos().sum()

    saved = {}
    for partition in ("min-cut", "save-all"):
        torch.compiler.reset()
        x = torch.randn(100, requires_grad=True)
        torch.compile(fn, backend="ferrite", options={"strict": True, "partition": partition})(x).backward()
        saved[partition] = ferrite.last_compile().saved
    assert saved["min-cut"].bytes < saved["save-all"].bytes
    assert saved["min-cut"].inputs == 1
    assert_same_as_eager(
        fn, lambda: [torch.randn(100, requires_grad=True)], backward=True, options={"partition": "save-all"}
    )


def test_saved_activations_are_freed_by_backward():
    kept = []

    @torch.library.custom_op("ferrite_test::keep", mutates_args=())
    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(x))
        return x.clone()

    keep.register_fake(torch.empty_like)
    keep.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.randn(4, requires_grad=True)
    out = torch.compile(lambda x: keep(x.exp()).exp(), backend="ferrite", options={"strict": True})(x)
    assert len(kept) == 1
    out.sum().backward()
    assert kept[0]() is None


def test_a_function_without_tensors_to_differentiate_has_no_backward_graph():
    graphs: list[CapturedGraph] = []
    torch.compile(lambda x: x + 1, backend=capturing(graphs))(torch.ones(2))
    assert [graph.kind for graph in graphs] == [GraphKind.INFERENCE]
