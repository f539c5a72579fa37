"""Small programs, one per thing that a loop IR must be able to say, each with the fact that shows it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.ir.program.loop_operations import Compute, Reduce, Scan, Sort
from ferrite.ir.program.nodes import Bind, Call, Program, Template
from tests.compare import assert_same_as_eager, compile_strict, compiled_graphs, reset
from tests.lower.lowered import INTERPRETER, calls, operations, programs, run


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    make: Callable[[], Sequence[Any]]
    fact: Callable[[Program], bool]
    exact: bool = True


def loops(*count: int) -> Callable[[Program], bool]:
    """So many operations over elements, and nothing that torch is called for."""
    return lambda program: len(operations(program, Compute)) in count and not calls(program)


def called(*names: str) -> Callable[[Program], bool]:
    return lambda program: [call.operator for call in calls(program)] == list(names)


def has(kind: type) -> Callable[[Program], bool]:
    return lambda program: bool(operations(program, kind)) and not calls(program)


def adds(program: Program) -> bool:
    stores = [store for loop in operations(program, Compute) for store in loop.stores]
    return any(store.mode == "add" for store in stores) and not calls(program)


def one_template(program: Program) -> bool:
    return len(operations(program, Template)) == len(calls(program)) == 1


def transposed_in_place(a: torch.Tensor) -> torch.Tensor:
    y = a + 1
    return y.t_() * 2


def mutated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    a[0].mul_(2)
    return a + b


def list_in_place(a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_add_([a, b], 1.0)


def stored(a: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    return a.index_put((i,), v), a.index_put((i,), v, accumulate=True)


def matrix() -> list[torch.Tensor]:
    return [torch.randn(8, 4)]


def two() -> list[torch.Tensor]:
    return [torch.randn(8, 4), torch.randn(8, 4)]


def indexed() -> list[torch.Tensor]:
    return [torch.randn(8, 4), torch.tensor([1, 5, 1]), torch.randn(3, 4)]


def reshaped(a: torch.Tensor) -> torch.Tensor:
    return (a.t().reshape(-1, 2).unsqueeze(0).expand(3, 16, 2) + 1).permute(2, 0, 1).contiguous()


TEN = [float(place) for place in range(10)]
CASES = {
    "elements": Case(lambda a, b: torch.sin(a) + 2 * b, two, loops(1)),
    "a_transposed_name": Case(transposed_in_place, matrix, loops(1)),
    "rows": Case(lambda a: a.softmax(-1), matrix, has(Reduce)),
    "a_constant": Case(lambda a: a + torch.tensor(TEN), lambda: [torch.randn(10)], lambda p: "constant(f32" in str(p)),
    "memory_that_is_filled": Case(lambda a: torch.empty(4).fill_(1) + a, lambda: [torch.randn(4)], loops(1)),
    "nothing_returned": Case(lambda a: (a + 1, None), matrix, loops(1)),
    "a_slice_of_what_is_pending": Case(
        lambda a: (a + 1)[2:5] * 2, matrix, lambda p: [str(x.extent) for x in p.operations[0].axes] == ["3", "4"]
    ),
    "parts": Case(lambda a: [x.sin() for x in (a + 1).split(2)], matrix, loops(4)),
    "as_strided": Case(lambda a: torch.as_strided(a + 1, (2, 2), (1, 2), 1), matrix, loops(1)),
    "reshapes": Case(reshaped, matrix, loops(1)),
    "reinterpreted": Case(lambda a: (a + 1).view(torch.int32) + 1, matrix, loops(1, 2), exact=False),
    "complex_view": Case(
        lambda a: (a + 1).view(torch.complex64) * 2, lambda: [torch.randn(8)], loops(1, 2), exact=False
    ),
    "transposed_copy": Case(lambda a: a.t().contiguous() + 1, matrix, loops(1)),
    "joined_without_copies": Case(lambda a, b: torch.cat([a + 1, b * 2]), two, loops(2)),
    "joined_channels_last": Case(
        lambda a: torch.cat([a, a * 2], 1),
        lambda: [torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
        loops(2),
    ),
    "joined_bytes": Case(lambda a: torch.cat([a, a]), lambda: [torch.ones(4, dtype=torch.int8)], loops(2)),
    "inputs_written": Case(mutated, lambda: [torch.randn(8, 4), torch.randn(4)], lambda p: not calls(p)),
    "lists_written": Case(list_in_place, two, loops(2)),
    "stores_by_index": Case(stored, indexed, adds),
    "sum": Case(lambda a: a.sum(-1), lambda: [torch.randn(8, 100)], has(Reduce)),
    "sum_of_nothing": Case(lambda a: a.sum(-1), lambda: [torch.randn(3, 0)], lambda p: not calls(p)),
    "place_of_the_largest": Case(lambda a: a.permute(1, 0).argmax(), matrix, has(Reduce)),
    "mean_and_variance": Case(lambda a: torch.var_mean(a, -1), lambda: [torch.randn(4, 4096)], has(Reduce)),
    "prefixes": Case(lambda a: a.cumsum(0), matrix, has(Scan)),
    "sorted": Case(lambda a: a.sort(-1), matrix, has(Sort)),
    "several_results": Case(lambda a: torch.linalg.qr(a)[1].abs(), matrix, called("aten.linalg_qr.default")),
    "a_product": Case(lambda a: (a @ a.t()).relu(), matrix, one_template),
    "a_convolution": Case(
        lambda a, w: F.conv2d(a, w), lambda: [torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)], one_template
    ),
    "a_sum_and_elements": Case(lambda a: (a.sin().sum() + a).cos(), matrix, lambda p: not calls(p)),
    "to_complex": Case(lambda a: a.to(torch.complex64), matrix, lambda p: True),
    "scattered": Case(
        lambda a, i, s: a.scatter_reduce(0, i, s, "amax"),
        lambda: [torch.randn(8), torch.tensor([1, 1, 3]), torch.randn(3)],
        lambda p: True,
    ),
    "stored_under_a_mask": Case(
        lambda a, v: a.index_put((a > 0,), v), lambda: [torch.randn(8, 4), torch.tensor(3.0)], lambda p: True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_capability(name: str) -> None:
    case = CASES[name]
    program = run(case.fn, case.make, dynamic=False, exact=case.exact)
    assert case.fact(program), str(program)


def test_a_view_of_an_input_that_begins_inside_its_memory() -> None:
    """The offset counts from the beginning of the memory, which the input does not say until it comes."""
    program = run(
        lambda a: torch.as_strided(a, (2, 2), (1, 2), 3) + 1,
        lambda: [torch.randn(12)],
        prepare=lambda x: [x[2:]],
        dynamic=False,
    )
    assert [bind.query for bind in operations(program, Bind)] == ["offset"]


def test_sizes_are_returned_without_a_loop() -> None:
    program = run(lambda a: (a + 1, a.shape[0] * 2), matrix, dynamic=True)
    assert str(program.outputs[1]).startswith("2*s")


def test_symbolic_reshapes_are_compiled_once() -> None:
    reset()
    compiled = compile_strict(lambda a: (a.t().reshape(-1) + 1).view(a.shape).sum(), options=INTERPRETER, dynamic=True)
    for rows in (3, 5, 7):
        a = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(a), (a + 1).sum())
    assert compiled_graphs() == 1


def test_operations_name_the_line_they_come_from() -> None:
    run(lambda a: a.sin() * 2, matrix, dynamic=False)
    (graph,) = ferrite.last_compile().graphs
    assert "test_capabilities.py" in graph.source


def test_saved_tensors_come_back_as_memory_of_ours() -> None:
    make = lambda: [torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(
        lambda a, b: torch.tanh(a @ b).sum(-1), make, backward=True, options=INTERPRETER, dynamic=False
    )
    backward = programs()[-1]
    assert "donated" in {buffer.kind for buffer in backward.buffers}


def test_a_shared_expensive_value_is_computed_once() -> None:
    def fn(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = a.exp()
        return shared + 1, shared * 2

    program = run(fn, matrix, dynamic=False)
    assert str(program).count("= exp(") == 1


def test_random_fills_are_drawn_by_torch_in_their_order() -> None:
    def fn(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a).bernoulli_(0.5) + torch.rand(8, 4) + a

    program = run(fn, matrix, dynamic=False, exact=False)
    assert [call.effect for call in calls(program) if call.effect is not None] == ["random", "random"]


@torch.library.custom_op("capabilities::bump", mutates_args={"x"})
def bump(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y + 1


@bump.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y)


def test_a_custom_operator_that_writes_and_returns() -> None:
    program = run(lambda a, b: (bump(a, b * 2) + a, a * 3), two, dynamic=False)
    (call,) = calls(program)
    assert len(call.writes) == 1
    assert isinstance(program.operations[0], Compute)
    assert any(isinstance(item, Call) for item in program.operations)
