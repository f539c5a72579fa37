"""Numbers that data decides: items, results of unknown size, indices of unknown sign, and assertions about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ferrite.ir.program.nodes import Assert, Bind, Item
from tests.compare import compile_strict, compiled_graphs, reset
from tests.lower.lowered import INTERPRETER, assert_lowered, calls, operations, programs, run


@pytest.fixture(autouse=True)
def numbers_in_the_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def sized_by_data(counts: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    n = counts.sum().item()
    torch._check(n >= 0)
    torch._check(n < 100)
    return torch.zeros(n) + b


def test_an_item_is_a_symbol_with_checks() -> None:
    reset()
    compiled = compile_strict(sized_by_data, options=INTERPRETER, fullgraph=True)
    for count in (4, 7):
        assert torch.equal(compiled(torch.tensor([count]), torch.tensor(2.0)), torch.full((count,), 2.0))
    (program,) = programs()
    assert len(operations(program, Item)) == 1
    assert any(item.message.startswith("Runtime assertion failed") for item in operations(program, Assert))
    assert not calls(program)
    with pytest.raises(RuntimeError, match=r"Runtime assertion failed for expression .* <"):
        compiled(torch.tensor([200]), torch.tensor(2.0))
    assert compiled_graphs() == 1


def test_fractions_truths_and_numbers_that_are_returned() -> None:
    def fn(a: torch.Tensor, flag: torch.Tensor, n: torch.Tensor) -> Any:
        factor = a.sum().item()
        return a * factor, torch.where(torch.tensor(flag.any().item()), a, a + 1), n.sum().item() * 2

    for flag in (True, False):
        make = lambda flag=flag: [torch.tensor([1.5, 2.5]), torch.tensor([flag]), torch.tensor([3, 4])]  # noqa: E731
        program = run(fn, make, fullgraph=True, exact=False)
        assert not calls(program)


def test_an_item_keeps_its_value_when_memory_changes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        first = x[0].item()
        x.add_(1)
        return x * first

    run(fn, lambda: [torch.tensor([2.0, 3.0])], fullgraph=True)


@pytest.mark.parametrize("place", [-2, 1])
def test_an_index_whose_sign_only_data_knows(place: int) -> None:
    program = run(
        lambda a, i: a[i.sum().item()] * 2, lambda: [torch.randn(4, 3), torch.tensor([place])], fullgraph=True
    )
    assert not calls(program)


@pytest.mark.parametrize("start", [-3, 2, 9])
def test_a_slice_whose_start_only_data_knows(start: int) -> None:
    program = run(
        lambda a, i: a[i.sum().item() :].sum(), lambda: [torch.randn(4, 3), torch.tensor([start])], fullgraph=True
    )
    assert not calls(program)


def test_a_result_of_unknown_size_defines_a_symbol() -> None:
    reset()
    compiled = compile_strict(lambda a: torch.nonzero(a).sum(0) + 1, options=INTERPRETER, fullgraph=True)
    for row in ([1, 0, 2], [0, 0, 0], [1, 1, 1]):
        a = torch.tensor(row)
        assert torch.equal(compiled(a), torch.nonzero(a).sum(0) + 1)
    (program,) = programs()
    (call,) = calls(program)
    assert (call.operator, call.reason) == ("aten.nonzero.default", "the shape of its result depends on data")
    found, rank = operations(program, Bind)
    assert (found.query, found.axis, rank.query, rank.axis) == ("size", 0, "size", 1)
    assert len(operations(program, Assert)) == 3  # of none to three rows, one number in each


DATA_SHAPES = {
    "unique": lambda x: torch.unique(x) * 2,
    "masked_select": lambda x: torch.masked_select(x, x > 1).sum(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()).sum(),
    "boolean_index": lambda x: x[x > 1] + 1,
}


@pytest.mark.parametrize("name", DATA_SHAPES)
def test_operators_whose_result_has_an_unknown_size(name: str) -> None:
    run(DATA_SHAPES[name], lambda: [torch.tensor([1.0, 0.0, 2.0, 2.0])], fullgraph=True)


def test_assertions_on_tensors() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "must be positive")
        torch._assert_async(x.sum())
        return x * 2

    compiled = compile_strict(fn, options=INTERPRETER, fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    (program,) = programs()
    assert operations(program, Assert)[0].message == "must be positive"
    assert not calls(program)
    with pytest.raises(RuntimeError, match="must be positive"):
        compiled(-torch.ones(3))


def test_ranges_are_asserted() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.sum().item()
        torch.ops.aten.sym_constrain_range_for_size(n, min=2, max=5)
        return torch.ones(n)

    program = assert_lowered(fn, torch.tensor([1, 2]))
    messages = [item.message for item in operations(program, Assert)]
    assert len(messages) == 2
    assert "between [2, 5]" in messages[0]


def test_metadata_was_checked_while_tracing() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_tensor_metadata(x, None, None, torch.float32)
        return x + 1

    program = assert_lowered(fn, torch.ones(3))
    assert len(program.operations) == 1
