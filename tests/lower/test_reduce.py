"""Reductions, softmax, norms, prefixes and orders as loop programs."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.program.loop_operations import Reduce, Scan, Sort
from ferrite.lower.table import how_lowered
from tests.lower.lowered import assert_interpreted_as_eager, assert_lowered, eager_calls, kinds, operations, program_of

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def test_a_sum_is_one_loop_without_temporaries():
    program = program_of(lambda a: a.sum(-1), torch.randn(8, 100))
    assert kinds(program) == ["reduce"]
    (loop,) = operations(program, Reduce)
    assert (loop.kind, len(loop.axes), len(loop.reduced)) == ("sum", 1, 1)
    assert [buffer.kind for buffer in program.buffers] == ["input", "owned"]


def test_what_is_summed_is_computed_inside_the_loop():
    program = program_of(lambda a, b: (a.sin() * b).sum(0), torch.randn(8, 5), torch.randn(8, 5))
    assert kinds(program) == ["reduce"]


def test_nothing_to_add_gives_zero_and_one_element_itself():
    assert kinds(program_of(lambda a: a.sum(-1), torch.randn(3, 0))) == ["reduce"]
    assert kinds(program_of(lambda a: a.sum(-1), torch.randn(3, 1))) == ["compute"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.uint8])
def test_sums_and_products_have_eagers_type(dtype):
    def fn(a):
        return a.sum(), a.sum(0), a.prod(1), a.sum(dtype=torch.float64)

    assert_interpreted_as_eager(fn, lambda: [torch.ones(3, 4).to(dtype)])


def test_many_half_precision_numbers_are_added_in_single_precision():
    def fn(a):
        return a.sum(), a.mean()

    assert_interpreted_as_eager(fn, lambda: [torch.full((4096,), 1.0, dtype=torch.bfloat16)])


def test_argmax_of_a_transposed_matrix_counts_in_logical_order():
    def fn(a):
        return a.permute(1, 0).argmax(), a.permute(1, 0).argmin(1), a.max(0), a.min(1, keepdim=True)

    assert_interpreted_as_eager(fn, lambda: [torch.randn(5, 7)])


def test_the_first_of_equals_and_a_nan_win():
    x = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 5.0, float("nan")], [-0.0, 0.0, 0.0]])
    assert_interpreted_as_eager(
        lambda a: (a.argmax(1), a.argmin(1), a.max(1), a.amax(1), a.amin(1)), lambda: [x.clone()], exact=False
    )


def test_both_results_of_a_maximum_come_from_one_pass():
    program = program_of(lambda a: a.max(1), torch.randn(4, 6))
    (loop,) = operations(program, Reduce)
    assert loop.kind == "argmax"
    assert None not in loop.destinations


def test_variance_takes_one_pass_and_keeps_small_spreads():
    program = program_of(lambda a: torch.var_mean(a, -1), torch.randn(4, 4096))
    assert [item.kind for item in operations(program, Reduce)] == ["welford"]
    assert_interpreted_as_eager(
        lambda a: (a.var(-1), a.std(0), a.var(), a.var(-1, correction=0)), lambda: [torch.randn(4, 9) + 1e4]
    )


def test_softmax_is_one_pass_for_statistics_and_one_for_elements():
    program = program_of(lambda a: torch.softmax(a, -1), torch.randn(8, 100))
    assert kinds(program) == ["reduce", "compute"]
    assert not eager_calls(program)
    owned = [buffer for buffer in program.buffers if buffer.kind == "owned"]
    assert len(owned) == 3, "two numbers per row, and the result"


def test_rows_of_minus_infinity_are_eagers():
    def fn(a):
        return torch.softmax(a, -1), torch.log_softmax(a, -1), torch.logsumexp(a, -1)

    assert_interpreted_as_eager(
        fn, lambda: [torch.tensor([[float("-inf")] * 3, [0.0, float("inf"), 1.0], [1.0, 2.0, 3.0]])], exact=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_and_its_gradients(dtype):
    layer = torch.nn.LayerNorm(16).to(dtype)
    assert_interpreted_as_eager(layer, lambda: [torch.randn(4, 3, 16).to(dtype).requires_grad_()], backward=True)


def test_sizes_may_be_symbols():
    def fn(a):
        return torch.softmax(a, 0), a.mean(1), a.var(0), a.argmax(1), a.cumsum(0)

    record = assert_interpreted_as_eager(fn, lambda: [torch.randn(5, 6)], dynamic=True)
    assert not record.eager_calls


def test_prefixes_are_scans():
    program = program_of(lambda a: a.cumsum(0), torch.randn(6, 3))
    assert kinds(program) == ["scan"]
    assert operations(program, Scan)[0].combine.name == "sum"
    assert_interpreted_as_eager(
        lambda a: (a.cumsum(0), a.cumprod(1), a.cummax(0), a.cummin(1), a.logcumsumexp(0), a[0, 0].cumsum(0)),
        lambda: [torch.randn(6, 3)],
    )


def test_sorting_gives_keys_and_places():
    program = program_of(lambda a: a.sort(-1), torch.randn(4, 9))
    assert kinds(program) == ["sort"]
    assert len(operations(program, Sort)[0].destinations) == 2
    x = torch.tensor([[3.0, float("nan"), 1.0, 3.0, -0.0]])
    assert_interpreted_as_eager(
        lambda a: (a.sort(dim=1, stable=True), a.sort(dim=1, descending=True, stable=True)),
        lambda: [x.clone()],
        exact=False,
    )


def test_an_order_that_is_torchs_own_is_left_to_torch():
    program = program_of(lambda a: a.mode()[0], torch.randn(4, 9))
    assert [call.reason for call in eager_calls(program)] == [how_lowered(aten.mode.default)[1]]


@pytest.mark.skipif(not hasattr(torch, "hash_tensor"), reason="this release has none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_the_hash_of_a_tensor(dtype):
    values = torch.randn(3, 4).to(dtype)
    program = assert_lowered(lambda a: [torch.hash_tensor(a), torch.hash_tensor(a, dim=1)], values)
    assert not eager_calls(program)


ZEROS = {
    "of -0.0": lambda: -torch.zeros(2, 3),
    "of either": lambda: torch.tensor([[0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]]),
    "a column": lambda: -torch.zeros(3, 1),
    "of equal numbers": lambda: torch.full((2, 3), 2.5),
}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.lengthy
def test_the_sign_of_zero_in_sums_and_normalised_rows(zeros: str) -> None:
    """Eager adds to 0.0, or adds 0.0 where there is no bias: `atan2` tells one zero from the other."""

    def fn(x):
        weight, bias = -torch.ones(x.shape[1]), torch.zeros(x.shape[1])
        layer, group = torch.nn.functional.layer_norm, torch.nn.functional.group_norm
        found = [x.sum(1), x.mean(1), layer(x, x.shape[1:]), layer(x, x.shape[1:], weight)]
        found += [layer(x, x.shape[1:], weight, bias), group(x, 1), group(x, 1, weight), group(x, 1, weight, bias)]
        return [each.signbit() for each in found]

    make = ZEROS[zeros]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="ferrite", fullgraph=True, options={"strict": True})
    assert [each.tolist() for each in compiled(make())] == [each.tolist() for each in fn(make())]


@pytest.mark.parametrize(("sizes", "dim"), [((3, 4), 2), ((3, 4), -3), ((), 1), ((), -2)], ids=str)
def test_a_softmax_along_a_dimension_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], dim: int
) -> None:
    """Torch's fake value of it passes; eager does not. Nobody asks it on a GPU."""
    monkeypatch.setattr("ferrite.backend.left_to_eager", lambda gm: None)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: (a * 2).softmax(dim), backend="ferrite", options={"strict": True})
    with pytest.raises(IndexError, match="Dimension out of range"):
        compiled(torch.randn(sizes))


@pytest.mark.parametrize(("sizes", "dim"), [((3, 4), 1), ((3, 4), -2), ((), 0), ((), -1)], ids=str)
def test_a_softmax_along_the_last_dimensions_that_are_there(sizes: tuple[int, ...], dim: int) -> None:
    program = assert_lowered(lambda a: a.softmax(dim), torch.randn(sizes))
    assert not eager_calls(program)
