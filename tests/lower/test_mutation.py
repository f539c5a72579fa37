"""Writes: into inputs and their views, through operators of the user, to other memory and other devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.loop_operations import Compute
from ferrite.ir.program.nodes import DeviceCopy, call_of
from ferrite.lower.graph import lower_module
from tests.lower.lowered import calls, operations, run, traced

aten = torch.ops.aten
LIBRARY = torch.library.Library("lower_mutation", "DEF")
LIBRARY.define("second_row(Tensor(a) x) -> Tensor(a)")
LIBRARY.impl("second_row", lambda x: x[1], "CPU")
LIBRARY.impl("second_row", lambda x: x[1], "Meta")


def between_reads(x: torch.Tensor) -> Any:
    before = x * 2
    x.add_(1)
    return before, x * 2


def through_views(x: torch.Tensor) -> torch.Tensor:
    x[1:].copy_(x[:-1].clone())
    x.t()[0].fill_(3)
    return x + 1


def shifted_onto_itself(x: torch.Tensor) -> torch.Tensor:
    """What is read overlaps what is written: eager reads all of it first here, since the source is a result."""
    x[1:].copy_(x[:-1] + 1)
    return x * 2


def accumulated(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.index_add_(0, i, x.new_ones(3, 4))
    x.masked_fill_(x > 1, 0.5)
    return x


WRITES = {
    "between_reads": (between_reads, lambda: [torch.randn(3, 4)]),
    "through_views": (through_views, lambda: [torch.randn(3, 4)]),
    "shifted_onto_itself": (shifted_onto_itself, lambda: [torch.randn(5, 4)]),
    "accumulated": (accumulated, lambda: [torch.randn(3, 4), torch.tensor([0, 2, 0])]),
}


@pytest.mark.parametrize("name", WRITES)
def test_inputs_are_written_as_eager_does(name: str) -> None:
    fn, make = WRITES[name]
    program = run(fn, make, dynamic=False)
    assert not calls(program)


def test_a_view_that_a_call_returns_begins_where_eager_has_it() -> None:
    """What is taken from that view afterwards counts from there."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        row = torch.ops.lower_mutation.second_row(x)
        return torch.linalg.norm(row[1:3]) + row[2]

    lowered = lower_module(traced(fn, torch.ones(3, 4)))
    (call,) = [each for each in calls(lowered.program) if each.operator == "lower_mutation.second_row.default"]
    row = lowered.program.buffer(call.results[0])
    assert (row.kind, row.base, str(row.offset)) == ("view", lowered.program.inputs[0], "4")


def test_memory_that_is_exchanged() -> None:
    """`set_` makes one tensor lie where another does."""
    graph = hand_built(lambda graph, a, b: graph.call_function(aten.set_.source_Tensor, (a, b)), returns="b")
    program = lower_module(graph).program
    (call,) = calls(program)
    assert call.writes == ("a",)
    assert call.operator == "aten.set_.source_Tensor"
    a, b = torch.zeros(4), torch.ones(4)
    (out,) = interpret(program, [a, b], {})
    assert a.data_ptr() == b.data_ptr()
    assert torch.equal(out, torch.full((4,), 2.0))


def test_memory_that_is_resized() -> None:
    graph = hand_built(lambda graph, a, b: graph.call_function(aten.resize_.default, (a, [4])), returns="a")
    program = lower_module(graph).program
    (call,) = calls(program)
    assert call.writes == ("a",)
    assert isinstance(program.operations[-1], Compute)


def hand_built(write: Any, returns: str) -> torch.fx.GraphModule:
    """Two inputs, a write between them, and one of them plus one."""
    mode = torch._subclasses.FakeTensorMode()
    graph = torch.fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("a", "b")}
    for node in inputs.values():
        node.meta["val"] = mode.from_tensor(torch.ones(4))
    written = write(graph, inputs["a"], inputs["b"])
    written.meta["val"] = inputs["a"].meta["val"]
    result = graph.call_function(aten.add.Tensor, (inputs[returns], 1))
    result.meta["val"] = mode.from_tensor(torch.ones(4))
    graph.output((result,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_copy_to_another_device_is_one_operation() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return aten._to_copy(x * 2, device=torch.device("cuda:0"))

    program = lower_module(traced(fn, torch.ones(3))).program
    first, copy = program.operations
    assert isinstance(first, Compute)
    assert isinstance(copy, DeviceCopy)
    assert program.buffer(copy.target).device == torch.device("cuda:0")


def test_a_constant_is_moved_when_compiling() -> None:
    table = torch.arange(3.0)
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    held = graph.get_attr("table")
    held.meta["val"] = mode.from_tensor(table)
    moved = graph.call_function(aten._to_copy.default, (held,), {"device": torch.device("meta")})
    with mode:
        moved.meta["val"] = torch.empty(3, device="meta")
    graph.output((moved,))
    gm = torch.fx.GraphModule({"table": table}, graph)
    lowered = lower_module(gm)
    assert not lowered.program.operations
    (name,) = lowered.program.outputs
    assert lowered.objects[name].device.type == "meta"


def test_operators_of_a_list_write_each_of_it() -> None:
    program = run(
        lambda a, b: torch._foreach_mul_([a, b], 2.0), lambda: [torch.randn(3), torch.randn(4)], dynamic=False
    )
    assert len(operations(program, Compute)) == 2
    assert all(call_of(item) is None for item in program.operations)
