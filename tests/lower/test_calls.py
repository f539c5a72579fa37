"""Graphs without kernels: every operator is one call, in order, with its reason; memory goes with its last use."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.capture import CapturedGraph, GraphKind
from ferrite.ir.program.nodes import Bind
from ferrite.lower import LoweringFailure, lower_graph
from ferrite.lower.arguments import literal_text
from ferrite.runtime import Boxed, load_host
from ferrite.schedule.plan import make_plan
from ferrite.targets import executable_of, runs_of
from tests.compare import assert_same_as_eager, compile_strict
from tests.lower.lowered import calls, operations, programs

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("program_of_calls")]

NO_KERNELS: frozenset[str] = frozenset()  # devices


def captured(fn, *inputs, mode="fake", strides=None) -> CapturedGraph:
    gm = make_fx(fn, tracing_mode=mode)(*inputs)
    count = len(gm.graph.output_node().args[0])
    return CapturedGraph(GraphKind.INFERENCE, gm, frozenset(), frozenset(), strides or (None,) * count)


def function_of(graph: CapturedGraph) -> Boxed:
    """The function of a graph, as the compiler makes it."""
    lowered = lower_graph(graph, NO_KERNELS)
    executable = executable_of(make_plan(lowered.program, {}, verify=True), {})
    return load_host(executable.source, runs_of(executable, {}), lowered.objects)


def operators() -> list[str]:
    """What the last compilation calls, in order."""
    return [call.operator for program in programs() for call in calls(program)]


def test_each_value_is_freed_right_after_its_last_use():
    def fn(x):
        for _ in range(20):
            x = x + 1
        return x

    assert_same_as_eager(fn, lambda: [torch.ones(2)])
    assert operators() == ["aten.add.Tensor"] * 20
    rows = [row.strip() for row in ferrite.last_compile().graphs[0].source.splitlines()]
    alive, most = set(), 0
    for row in rows:
        name, _, value = row.partition(" = ")
        if row.startswith("del "):
            alive -= set(row.removeprefix("del ").split(", "))
        elif value.startswith("op_"):
            assert all(each in value for each in alive)  # what is there is read now, or was freed before
            alive.add(name)
        most = max(most, len(alive))
    assert most == 2


def test_inputs_are_taken_over_and_freed_while_running():
    function, value = function_of(captured(lambda x: (x + 1 + 2,), torch.ones(2))), torch.ones(2)
    seen, reference = [], weakref.ref(value)
    scope = inspect.unwrap(function).__globals__  # of the host program
    add = scope["op_aten_add_Tensor"]

    def spy(*args):
        seen.append(reference() is None)
        return add(*args)

    scope["op_aten_add_Tensor"] = spy
    args = [value]
    del value
    (result,) = function(args)
    assert torch.equal(result, torch.full((2,), 4.0))
    assert args == []
    assert seen == [False, True]


def test_what_is_returned_is_the_tensor_that_was_given():
    assert_same_as_eager(lambda x: (x, x + 1, x), lambda: [torch.ones(2)])
    x = torch.ones(2)
    first, _second, third = function_of(captured(lambda x: (x, x + 1, x), x))([x])
    assert first is x
    assert third is x


def test_effects_are_in_the_order_of_the_graph():
    def fn(x):
        a = torch.rand_like(x)
        x.add_(1)
        b = torch.rand_like(x)
        x.mul_(2)
        return a, b

    assert_same_as_eager(fn, lambda: [torch.ones(2)], exact=False)
    graph = captured(fn, torch.ones(2))
    found = [call.operator.split(".")[1] for call in calls(lower_graph(graph, NO_KERNELS).program)]
    assert found == ["rand_like", "add_", "rand_like", "mul_"]
    x, y = torch.ones(2), torch.ones(2)
    torch.manual_seed(0)
    ours = function_of(graph)([x])
    torch.manual_seed(0)
    assert all(map(torch.equal, ours, fn(y)))
    assert torch.equal(x, y)


def test_a_result_nobody_reads_is_not_held_but_its_effect_stays():
    def fn(x, y):
        x.copy_(y)
        return (y * 2,)

    x, y = torch.zeros(2), torch.ones(2)
    (result,) = function_of(captured(fn, x, y))([x, y])
    assert torch.equal(x, y)
    assert torch.equal(result, torch.full((2,), 2.0))


def test_sizes_are_numbers_of_python():
    def fn(n, x):
        return (x.new_zeros(x.shape[0] * 2 + n), x.shape[1] // 2)

    zeros, half = function_of(captured(fn, 4, torch.ones(3, 6), mode="symbolic"))([7, torch.ones(5, 9)])
    assert zeros.shape == (17,)
    assert half == 4
    assert type(half) is int
    assert "sym_size" not in str(lower_graph(captured(fn, 4, torch.ones(3, 6), mode="symbolic"), ()).program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, 3, dtype=torch.int16),
        lambda: torch.empty_strided((2, 3), (1, 2), device="meta"),
        lambda: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last),
    ],
)
def test_empty_memory_looks_as_in_eager(make):
    (made,), expected = function_of(captured(lambda x: (make(),), torch.ones(2)))([torch.ones(2)]), make()
    looks = [(each.shape, each.stride(), each.dtype, each.device) for each in (made, expected)]
    assert looks[0] == looks[1]


def test_constants_are_supplied_when_loading():
    constant = torch.tensor([1.0, 2.0])
    assert_same_as_eager(lambda x: x + constant, lambda: [torch.ones(2)])
    graph = captured(lambda x: (x + constant,), torch.ones(2), mode="real")
    lowered = lower_graph(graph, NO_KERNELS)
    assert [value is constant for value in lowered.objects.values()] == [True]
    (result,) = function_of(graph)([torch.ones(2)])
    assert torch.equal(result, torch.tensor([2.0, 3.0]))


def test_an_output_with_other_strides_than_eager_is_copied():
    (result,) = function_of(captured(lambda x: (x + 1,), torch.ones(2, 3), strides=((1, 2),)))([torch.ones(2, 3)])
    assert result.stride() == (1, 2)
    assert torch.equal(result, torch.full((2, 3), 2.0))


def test_an_output_with_eagers_strides_is_returned_as_it_is():
    program = lower_graph(captured(lambda x: (x + 1,), torch.ones(2, 3), strides=((3, 1),)), NO_KERNELS).program
    (operation,) = program.operations
    assert calls(program) == [operation]


def test_symbolic_strides_bind_the_symbols_they_need():
    graph = captured(lambda x: (x + 1,), torch.ones(3, 5), mode="symbolic")
    rows, _columns = next(iter(graph.gm.graph.nodes)).meta["val"].shape
    graph = CapturedGraph(graph.kind, graph.gm, frozenset(), frozenset(), ((1, rows),))
    found = operations(lower_graph(graph, NO_KERNELS).program, Bind)
    assert ("size", 0) in [(bind.query, bind.axis) for bind in found]
    (result,) = function_of(graph)([torch.ones(4, 7)])
    assert result.stride() == (1, 4)
    assert torch.equal(result, torch.full((4, 7), 2.0))


def test_a_failure_names_its_node():
    gm = make_fx(lambda x: (x + 1,))(torch.ones(2))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.op = "call_method"
    graph = CapturedGraph(GraphKind.INFERENCE, gm, frozenset(), frozenset(), (None,))
    with pytest.raises(LoweringFailure) as caught:
        lower_graph(graph, NO_KERNELS)
    assert caught.value.node is node


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -1,
        2.5,
        -0.0,
        float("inf"),
        float("-inf"),
        1 + 2j,
        complex("inf"),
        "a'b",
        ...,
        torch.float32,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
        torch.ops.aten.add.Tensor,
    ],
)
def test_literals_read_back_as_the_same_value(value):
    text = literal_text(value)
    again = eval(text, {"torch": torch})
    assert type(again) is type(value)
    assert again == value
    assert str(again) == str(value)  # tells -0.0 from 0.0


def test_nan_has_a_literal_and_objects_have_none():
    assert eval(literal_text(float("nan"))) != eval(literal_text(float("nan")))
    assert literal_text(object()) is None
    assert literal_text(torch.ones(1)) is None


def test_calls_know_their_reason():
    x = torch.ones(2)
    assert torch.equal(compile_strict(lambda x: x.sin() + 1)(x), x.sin() + 1)
    record = ferrite.last_compile()
    assert not record.kernels
    assert [(call.operator, call.reason) for call in record.eager_calls] == [
        ("aten.sin.default", "no kernels are made on cpu"),
        ("aten.add.Tensor", "no kernels are made on cpu"),
    ]
    assert all("x.sin() + 1" in call.line.code for call in record.eager_calls)
