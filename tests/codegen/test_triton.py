"""Kernels as Triton source: the same numbers as element by element, in the interpreter and on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from ferrite.codegen.triton import grid, statements
from ferrite.ir.kernel.nodes import checks
from tests.loop_kernels import GATHER, KERNELS, SCATTER_ADD, changed
from tests.triton_kernels import (
    BIG,
    BLOCKS,
    CONDITIONS,
    COUNTS,
    DEVICES,
    IN_PLACE,
    LINEAR_SCANS,
    ON_A_GPU,
    OWN_MAXIMUM,
    PLANES,
    ROW_SCANS,
    SORTED_ROWS,
    TILE_SUMS,
    TRIANGLE,
    TWO_CHECKS,
    assert_same_results,
    kernel_of,
    run_both,
    run_triton,
)

NAN, INF = float("nan"), float("inf")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


THREE = torch.zeros(3, dtype=torch.int64)


def nan(*shape):
    return torch.full(shape, NAN)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a few elements need several of them."""
    monkeypatch.setattr(grid, "LOOPED_ELEMENTS", 8)
    monkeypatch.setattr(grid, "NESTED_ELEMENTS", 4)
    monkeypatch.setattr(statements, "MAX_BLOCK_ELEMENTS", 16)


# --- kernels written by hand ------------------------------------------------------------------------------------------


def cases():
    torch.manual_seed(0)
    rows, wide = torch.randn(3, 11), torch.randn(19)
    ties = torch.tensor([[1.0, 3, 3, 2, 3], [NAN, 9, NAN, 1, 1], [-INF] * 5])
    where, source = torch.tensor([5, 0, 5, 5, 2]), torch.randn(5, 3)
    scale = torch.randn(5, dtype=torch.bfloat16)
    places = torch.zeros(3, dtype=torch.int64)
    yield "pointwise", [torch.randn(3, 5), scale, nan(3, 5)], [3]
    yield "pointwise", [torch.randn(0, 5), scale, nan(0, 5)], [0]
    yield "row softmax", [rows, nan(3, 11)], [3, 11]
    yield "row softmax", [rows[:, :1], nan(3, 1)], [3, 1]
    yield "online softmax", [wide, nan(19)], [19]
    for values in ([1.0, -INF, 2.0], [INF, 1.0], [-INF, -INF], [NAN, 1.0], [2.0]):
        yield "online softmax", [torch.tensor(values), nan(len(values))], [len(values)]
    yield "argmax", [rows, nan(3), places], [3, 11]
    yield "argmax", [ties, nan(3), places], [3, 5]
    yield "welford", [rows, nan(3), nan(3)], [3, 11]
    yield "scatter-add", [where, source, torch.randn(6, 3)], [5]
    yield "gather", [where, torch.randn(6), nan(5)], [5]
    yield "centred rows", [rows, nan(3, 11)], [3, 11]
    yield "gather", [where.neg(), torch.randn(6), nan(5)], [5]
    yield "ragged rows", [torch.tensor([0, 3, 3, 7, 8]), torch.randn(12, 6), nan(4, 6)], [4]
    yield "ragged lanes", [torch.tensor([0, 4, 1, 3, 2, 0, 4]), torch.randn(7, 4), nan(7)], [7]
    yield "cumulative sum", [wide, nan(19)], [19]
    yield "linear scan", [wide, wide.flip(0), nan(19)], [19]
    yield "column sums", [rows, nan(11), nan(11)], [3, 11]
    yield "column sums", [rows[:0], nan(11), nan(11)], [0, 11]


CASES = list(cases())
IDS = [case[0].replace(" ", "-") for case in CASES]


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_kernel_computes_the_same(case, device):
    name, memory, sizes = CASES[case]
    assert_same_results(kernel_of(KERNELS[name]), memory, sizes, device)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [0, 4, 10, 13, 14, 18], ids=lambda case: IDS[case])
def test_a_kernel_computes_the_same_in_small_blocks(case, device, small_blocks):
    name, memory, sizes = CASES[case]
    assert_same_results(kernel_of(KERNELS[name]), memory, sizes, device)


STATED = {
    "row scans": (ROW_SCANS, [torch.randn(3, 19), nan(3, 19), nan(3)], [3, 19]),
    "sorted rows": (
        SORTED_ROWS,
        [torch.randint(-9, 9, (3, 11)), torch.zeros(3, 11, dtype=torch.int64), THREE],
        [3, 11],
    ),
    "sorted rows of nothing": (SORTED_ROWS, [THREE[:0], THREE[:0], THREE], [3, 0]),
    "no row": (ROW_SCANS, [nan(0), nan(0), nan(0)], [0, 5]),
    "rows of nothing": (ROW_SCANS, [nan(0), nan(0), nan(3)], [3, 0]),
    "linear scan": (LINEAR_SCANS, [torch.randn(19), torch.randn(19), nan(19)], [19]),
    "blocks": (BLOCKS, [torch.randn(6, 16), nan(6, 48)], [6]),
}


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATED, ids=lambda name: name.replace(" ", "-"))
def test_a_kernel_that_says_its_blocks_computes_the_same(name, device):
    source, memory, sizes = STATED[name]
    assert_same_results(kernel_of(source), memory, sizes, device)


# --- checks -----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_an_index_outside_is_the_error_of_eager(device):
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension with size 6"):
        run_on(GATHER, [torch.tensor([1, 6]), torch.randn(6), nan(2)], [2], device)
    with pytest.raises(IndexError, match="index 1073741824 is out of bounds"):  # and nothing is touched there
        run_on(GATHER, [torch.tensor([1, 1 << 30]), torch.randn(6), nan(2)], [2], device)
    own = changed(SCATTER_ADD, "data(row, 6)", "data(row, 6, 'RuntimeError: {index} of {size}')")
    with pytest.raises(RuntimeError, match="-1 of 6"):
        run_on(own, [torch.tensor([1, -1]), torch.randn(2, 3), torch.randn(6, 3)], [2], device)


def run_on(source, memory, sizes, device):
    from ferrite.codegen.triton.run import run

    run(kernel_of(source), [tensor.reshape(-1).clone().to(device) for tensor in memory], sizes)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_a_gather_from_a_gather_says_which_check_failed(device):
    kernel = kernel_of(TWO_CHECKS)
    assert len(checks(kernel)) == 2
    where, there, source = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 1], dtype=torch.int32), torch.randn(4)
    assert_same_results(kernel, [where, there, source, nan(3)], [3], device)
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension with size 3"):
        run_on(TWO_CHECKS, [where + 1, there, source, nan(3)], [3], device)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension with size 4"):
        run_on(TWO_CHECKS, [where, there + 1, source, nan(3)], [3], device)


# --- loops, conditions, memory ----------------------------------------------------------------------------------------


def more_cases():
    torch.manual_seed(0)
    x, halves = torch.randn(64), torch.randn(36).bfloat16()
    negative = torch.tensor([-9, -3, -7, -5, -4], dtype=torch.int32)
    yield "in place", IN_PLACE, [torch.rand(28) + 0.5], [7]
    yield "triangle", TRIANGLE, [x, torch.zeros(49)], [7]
    yield "triangle of nothing", TRIANGLE, [x, torch.zeros(1)], [0]
    yield "conditions", CONDITIONS, [x, torch.zeros(8)], [4, 9]
    yield "conditions on nothing", CONDITIONS, [x, torch.zeros(8)], [4, 0]
    yield "own maximum", OWN_MAXIMUM, [negative, torch.zeros_like(negative[:1])], [5]
    yield "tile sums", TILE_SUMS, [halves, halves[:12].clone()], [2]
    yield "counts", COUNTS, [torch.tensor([3, 0, 3, 1, 3]), torch.zeros(4, dtype=torch.int64), negative[:1]], [5]
    yield "planes", PLANES, [x, nan(12)], [3, 4, 4]


MORE = list(more_cases())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", ["large", "small"])
@pytest.mark.parametrize("case", range(len(MORE)), ids=[case[0].replace(" ", "-") for case in MORE])
def test_loops_conditions_and_memory(case, blocks, device, request):
    _, source, memory, sizes = MORE[case]
    kernel = kernel_of(source)
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    assert_same_results(kernel, memory, sizes, device)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_narrow_indices_do_not_wrap(device):
    expected, made = run_both(kernel_of(BIG), [torch.zeros(3, dtype=torch.int64)], [100000], device)
    assert torch.equal(made[0], expected[0])
    assert int(made[0][2]) == 3 * 10**10 - 10**5


# --- sizes of a GPU ---------------------------------------------------------------------------------------------------


def large_cases():
    """Name, memory, sizes and results."""
    torch.manual_seed(0)
    rows, wide = torch.randn(50, 4000), torch.randn(100_003)
    where, table = torch.randint(0, 6, (100_003,)), torch.randn(6)
    variance, mean = torch.var_mean(rows, 1, correction=0)
    yield "row softmax", [rows, nan(50, 4000)], [50, 4000], [rows.softmax(1)]
    yield "online softmax", [wide, nan(100_003)], [100_003], [wide.softmax(0)]
    yield "argmax", [rows, nan(50), torch.zeros(50).long()], [50, 4000], list(rows.max(1))
    yield "welford", [rows, nan(50), nan(50)], [50, 4000], [mean, variance]
    yield "gather", [where, table, nan(100_003)], [100_003], [table[where]]
    yield "column sums", [rows, nan(4000), nan(4000)], [50, 4000], [rows.sum(0), (rows * rows).sum(0)]
    counted = torch.zeros(6, 3).index_add(0, where, torch.ones(100_003, 3))
    yield "scatter-add", [where, torch.ones(100_003, 3), torch.zeros(6, 3)], [100_003], [counted]


LARGE = ("row softmax", "online softmax", "argmax", "welford", "gather", "column sums", "scatter-add")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_A_GPU) for name in LARGE])
def test_many_threads_compute_the_same(name):
    cases = {name: case for name, *case in large_cases()}
    assert tuple(cases) == LARGE
    memory, sizes, expected = cases[name]
    made = run_triton(kernel_of(KERNELS[name]), memory, sizes, "cuda")
    for one, other in zip(made[-len(expected) :], expected, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_threads_see_what_others_stored():
    kernel = kernel_of(changed(IN_PLACE, "symbol(1, 64)", "symbol(1, 4096)"))
    x = torch.rand(4 * 4096) * 1e-3
    total = x[:4096] + x[:4096].sum()
    rows = [total, *x[4096:].split(4096)]
    for place in range(3):
        rows[place + 1] = rows[place + 1] * rows[place].flip(0)
    (made,) = run_triton(kernel, [x], [4096], "cuda")
    torch.testing.assert_close(made, torch.cat(rows), rtol=1e-4, atol=1e-6)
