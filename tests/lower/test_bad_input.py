"""What has no loop form runs in eager, with a reason in plain words, or raises what eager raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.nodes import Template
from ferrite.lower.graph import lower_module
from tests.compare import compile_strict, since
from tests.lower.lowered import INTERPRETER, calls, operations, programs, run, traced

aten = torch.ops.aten


def reasons(program: Any) -> list[str]:
    return [call.reason for call in calls(program)]


def test_a_sparse_tensor_is_known_to_calls_alone() -> None:
    """It comes in, goes through operators, and out again; nobody asks for its strides."""
    few, dense = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.full((2, 2), 3.0)

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return aten.mm(x.to_sparse(), y) + 1

    lowered = lower_module(traced(fn, few, dense))
    kinds = {buffer.kind for buffer in lowered.program.buffers}
    assert "foreign" in kinds
    assert len(reasons(lowered.program)) == 2
    assert all(reasons(lowered.program))
    assert not operations(lowered.program, Template), "a product with a sparse tensor is no matrix product of ours"
    (mine,) = interpret(lowered.program, [few, dense], lowered.objects)
    assert torch.equal(mine, fn(few, dense))


def test_a_sparse_input_of_rows() -> None:
    """Its layout has no strides at all to ask for."""
    rows, dense = torch.eye(2).to_sparse_csr(), torch.full((2, 2), 3.0)
    lowered = lower_module(traced(lambda x, y: aten.mm(x, y) * 2, rows, dense))
    assert lowered.program.buffer(lowered.program.inputs[0]).kind == "foreign"
    (mine,) = interpret(lowered.program, [rows, dense], lowered.objects)
    assert torch.equal(mine, dense * 2)


def test_elements_of_a_type_without_arithmetic_are_left_to_torch() -> None:
    x = torch.ones(4).to(torch.float8_e5m2)
    program = run(lambda x: x.to(torch.float32) * 2, lambda: [x], dynamic=False)
    assert program.outputs


def test_an_operator_without_a_fake_kernel_is_the_error_that_torch_raises() -> None:
    @torch.library.custom_op("lower_bad::nothing_known", mutates_args=())
    def nothing_known(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    compiled = compile_strict(lambda x: nothing_known(x) + 1, options=INTERPRETER, fullgraph=True)
    with pytest.raises(Exception, match="lower_bad"):
        compiled(torch.ones(3))


def test_an_operator_that_raises_raises_its_own_error() -> None:
    compiled = compile_strict(lambda x: torch.linalg.cholesky(x) + 1, options=INTERPRETER)
    compiled(torch.eye(2))
    (program,) = programs()
    assert all(reason and not reason.endswith(".") for reason in reasons(program))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):  # type: ignore[attr-defined]
        compiled(-torch.eye(2))


def test_an_index_outside_raises_as_eager() -> None:
    compiled = compile_strict(lambda x, i: x[i] * 2, options=INTERPRETER)
    x = torch.arange(4.0)
    assert torch.equal(compiled(x, torch.tensor([0, -1])), torch.tensor([0.0, 6.0]))
    with pytest.raises(IndexError, match=r"out of (bounds|range)"):
        compiled(x, torch.tensor([7]))


def test_a_shape_from_data_without_a_bound() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        program = run(lambda x: torch.nonzero(x).sum(), lambda: [torch.tensor([0, 1, 2])], fullgraph=True)
    assert reasons(program) == ["the shape of its result depends on data"]


@pytest.mark.parametrize(
    ("scatter", "sizes", "part", "given"),
    [
        pytest.param(torch.diagonal_scatter, (), (), (), marks=since(2, 13)),
        (torch.diagonal_scatter, (3, 3), (4,), ()),
        (torch.diagonal_scatter, (3, 3), (3,), (0, 1, 1)),
        (torch.select_scatter, (3, 3), (3,), (0, 5)),
        (torch.select_scatter, (3, 3), (1,), (0, 1)),
        (torch.slice_scatter, (3, 3), (1, 3), (0, 0, 2)),
        (torch.slice_scatter, (), (), (0, 0, 2)),
        (torch.diagonal_scatter, (3, 3), (3,), ()),  # and those that fit
        (torch.select_scatter, (3, 3), (3,), (-1, -3)),
        (torch.slice_scatter, (3, 3), (2, 3), (0, -2, 9)),
    ],
)
def test_a_part_that_does_not_fit_is_refused_as_in_eager(scatter, sizes, part, given):
    """Tracing looks neither at the sizes of what is written nor at the place."""

    def fn(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return scatter(x * 2, part, *given) + 1

    x, part = torch.randn(sizes), torch.randn(part)
    try:
        expected = fn(x, part)
    except Exception as problem:
        with pytest.raises(type(problem)):
            compile_strict(fn)(x, part)
    else:
        torch.testing.assert_close(compile_strict(fn)(x, part), expected)
