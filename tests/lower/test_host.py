"""Lowering to a host program: order, frees, sizes, allocation, constants, output strides."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.capture import CapturedGraph, GraphKind
from ferrite.codegen import print_host
from ferrite.ir import Allocate, Bind, Call, Constant, Evaluate, Free, HostProgram, Literal, Ref, Restride
from ferrite.ir.host import binds, reads
from ferrite.lower import LoweringFailure, lower
from ferrite.lower.arguments import literal_text
from ferrite.runtime import load

pytestmark = pytest.mark.quick


def captured(fn, *inputs, mode="fake", strides=None) -> CapturedGraph:
    gm = make_fx(fn, tracing_mode=mode)(*inputs)
    count = len(gm.graph.output_node().args[0])
    return CapturedGraph(GraphKind.INFERENCE, gm, frozenset(), frozenset(), strides or (None,) * count)


def steps_of(program: HostProgram, kind):
    return [step for step in program.steps if isinstance(step, kind)]


def live_at_most(program: HostProgram) -> int:
    """The largest number of values alive at once."""
    live = {item.name for item in program.inputs}
    most = len(live)
    for step in program.steps:
        if isinstance(step, Free):
            live -= set(step.names)
        elif binds(step) is not None:
            live.add(binds(step))
        most = max(most, len(live))
    return most


def test_each_value_is_freed_right_after_its_last_use():
    def fn(x):
        for _ in range(20):
            x = x + 1
        return (x,)

    program = lower(captured(fn, torch.ones(2))).program
    assert len(program.calls) == 20
    assert live_at_most(program) == 2
    last_reader = {}
    for position, step in enumerate(program.steps):
        if isinstance(step, Free):
            for name in step.names:
                assert last_reader[name] == position - 1
        else:
            last_reader.update(dict.fromkeys(reads(step), position))


def test_an_input_nobody_reads_is_freed_first():
    program = lower(captured(lambda x, y: (y + 1,), torch.ones(2), torch.ones(2))).program
    assert program.steps[0] == Free((program.inputs[0].name,))


def test_what_is_returned_is_never_freed():
    program = lower(captured(lambda x: (x, x + 1, x), torch.ones(2))).program
    assert not steps_of(program, Free)
    assert program.outputs[0] == program.outputs[2] == Ref(program.inputs[0].name)


def test_a_result_nobody_reads_is_not_bound_but_its_effect_stays():
    def fn(x, y):
        x.copy_(y)
        return (y * 2,)

    program = lower(captured(fn, torch.ones(2), torch.ones(2))).program
    assert [(call.operator, call.result is None) for call in program.calls] == [
        ("aten.copy_.default", True),
        ("aten.mul.Tensor", False),
    ]


def test_order_of_effects_is_the_order_of_the_graph():
    def fn(x):
        a = torch.rand_like(x)
        x.add_(1)
        b = torch.rand_like(x)
        x.mul_(2)
        return (a, b)

    program = lower(captured(fn, torch.ones(2))).program
    assert [call.operator.split(".")[1] for call in program.calls] == ["rand_like", "add_", "rand_like", "mul_"]


def test_sizes_are_python_and_named_after_their_symbols():
    def fn(n, x):
        return (x.new_zeros(x.shape[0] * 2 + n), x.shape[1] // 2)

    lowered = lower(captured(fn, 4, torch.ones(3, 6), mode="symbolic"))
    text = print_host(lowered.program).text
    assert steps_of(lowered.program, Evaluate)
    assert " * 2" in text
    assert " // 2" in text
    assert "aten_sym_size" not in text
    zeros, half = load(print_host(lowered.program), lowered.constants)([7, torch.ones(5, 9)])
    assert zeros.shape == (17,)
    assert half == 4
    assert type(half) is int


def test_empty_memory_is_allocated_by_the_host():
    def fn(x):
        return (torch.empty(2, 3, dtype=torch.int16), torch.empty_strided((2, 3), (1, 2), device="meta"))

    lowered = lower(captured(fn, torch.ones(2)))
    assert len(steps_of(lowered.program, Allocate)) == 2
    assert not lowered.program.calls
    plain, strided = load(print_host(lowered.program), lowered.constants)([torch.ones(2)])
    assert (plain.dtype, plain.shape, plain.stride()) == (torch.int16, (2, 3), (3, 1))
    assert (strided.device.type, strided.stride()) == ("meta", (1, 2))


def test_empty_memory_in_another_format_stays_an_operator():
    def fn(x):
        return (torch.empty(1, 2, 3, 4, memory_format=torch.channels_last),)

    lowered = lower(captured(fn, torch.ones(2)))
    assert [call.operator for call in lowered.program.calls] == ["aten.empty.memory_format"]
    (made,) = load(print_host(lowered.program), lowered.constants)([torch.ones(2)])
    assert made.is_contiguous(memory_format=torch.channels_last)


def test_sizes_and_memory_that_nobody_reads_are_left_out():
    gm = make_fx(lambda x: (x + 1,), tracing_mode="symbolic")(torch.ones(3))
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.placeholders()[0] if hasattr(gm.graph, "placeholders") else next(iter(gm.graph.nodes))
        size = gm.graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
        gm.graph.call_function(operator.mul, (size, 2))
    graph = CapturedGraph(GraphKind.INFERENCE, gm, frozenset(), frozenset(), (None,))
    assert not steps_of(lower(graph).program, Evaluate)


def test_constants_are_supplied_when_loading():
    constant = torch.tensor([1.0, 2.0])
    lowered = lower(captured(lambda x: (x + constant,), torch.ones(2), mode="real"))
    assert len(lowered.constants) == 1
    constant_arguments = [arg for call in lowered.program.calls for arg in call.args if isinstance(arg, Constant)]
    assert constant_arguments
    (result,) = load(print_host(lowered.program), lowered.constants)([torch.ones(2)])
    assert torch.equal(result, torch.tensor([2.0, 3.0]))


def test_an_output_with_other_strides_than_eager_is_copied():
    lowered = lower(captured(lambda x: (x + 1,), torch.ones(2, 3), strides=((1, 2),)))
    (restride,) = steps_of(lowered.program, Restride)
    assert restride.strides == ("1", "2")
    (result,) = load(print_host(lowered.program), lowered.constants)([torch.ones(2, 3)])
    assert result.stride() == (1, 2)
    assert torch.equal(result, torch.full((2, 3), 2.0))


def test_an_output_with_eagers_strides_is_returned_as_it_is():
    lowered = lower(captured(lambda x: (x + 1,), torch.ones(2, 3), strides=((3, 1),)))
    assert not steps_of(lowered.program, Restride)


def test_symbolic_strides_bind_the_symbols_they_need():
    graph = captured(lambda x: (x + 1,), torch.ones(3, 5), mode="symbolic")
    placeholder = next(iter(graph.gm.graph.nodes))
    rows, _columns = placeholder.meta["val"].shape
    graph = CapturedGraph(graph.kind, graph.gm, frozenset(), frozenset(), ((1, rows),))
    lowered = lower(graph)
    (bind,) = steps_of(lowered.program, Bind)
    assert (bind.tensor, bind.query, bind.axis) == (placeholder.name, "size", 0)
    (result,) = load(print_host(lowered.program), lowered.constants)([torch.ones(4, 7)])
    assert result.stride() == (1, 4)
    assert torch.equal(result, torch.full((4, 7), 2.0))


def test_inputs_are_taken_over_and_freed_while_running():
    seen = []

    def watch(value):
        seen.append(value() is None)

    import weakref

    graph = captured(lambda x: (x + 1 + 2,), torch.ones(2))
    lowered = lower(graph)
    function = load(print_host(lowered.program), lowered.constants)
    value = torch.ones(2)
    reference = weakref.ref(value)
    second = function.__globals__["aten_add_Tensor"]

    def spy(*args):
        watch(reference)
        return second(*args)

    function.__globals__["aten_add_Tensor"] = spy
    args = [value]
    del value
    function(args)
    assert args == []
    assert seen == [False, True]


def test_a_failure_names_its_node():
    gm = make_fx(lambda x: (x + 1,))(torch.ones(2))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.op = "call_method"
    graph = CapturedGraph(GraphKind.INFERENCE, gm, frozenset(), frozenset(), (None,))
    with pytest.raises(LoweringFailure) as caught:
        lower(graph)
    assert caught.value.node is node
    assert "no call_method nodes" in str(caught.value.__cause__)


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
    program = lower(captured(lambda x: (x + 1,), torch.ones(2))).program
    assert [(call.operator, call.reason) for call in program.calls] == [("aten.add.Tensor", "not yet lowered")]
    assert isinstance(program.calls[0].args[1], Literal)
    assert isinstance(program.calls[0], Call)
