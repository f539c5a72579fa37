"""Kernels as machine code compute what the oracle does."""

from __future__ import annotations

import pytest
import torch

from ferrite.codegen.llvm.build import object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import PROCESSORS
from ferrite.ir.kernel.parse import parse_kernel
from tests.llvm_kernels import assert_close, native
from tests.loop_kernels import GATHER, KERNELS, SCATTER_ADD, changed


def nan(*shape):
    return torch.full(shape, float("nan"))


def cases():
    torch.manual_seed(0)
    rows = torch.randn(4, 67)
    ties = torch.tensor([[1.0, 3, 3, 2, 3], [float("nan"), 9, float("nan"), 1, 1], [float("-inf")] * 5])
    for n in (0, 1, 3, 70):
        yield "pointwise", [torch.randn(n, 5), torch.randn(5).bfloat16(), nan(n, 5)], [n]
    for n in (1, 3, 7, 16, 67):
        yield "row softmax", [rows[:, :n].contiguous(), nan(4, n)], [4, n]
        yield "welford", [rows[:, :n].contiguous(), nan(4), nan(4)], [4, n]
        yield "argmax", [rows[:, :n].contiguous(), nan(4), torch.zeros(4, dtype=torch.int64)], [4, n]
        yield "online softmax", [rows[0, :n].clone(), nan(n)], [n]
        yield "column sums", [rows.t()[:n].contiguous(), nan(4), nan(4)], [n, 4]
        yield "column sums", [rows[:, :n].contiguous(), nan(n), nan(n)], [4, n]
        yield "centred rows", [rows[:, :n].contiguous(), nan(4, n)], [4, n]
        yield "cumulative sum", [rows[0, :n].clone(), nan(n)], [n]
        yield "linear scan", [rows[0, :n].clone(), rows[1, :n].clone(), nan(n)], [n]
    yield "column sums", [rows[:0], nan(67), nan(67)], [0, 67]
    yield "argmax", [ties, nan(3), torch.zeros(3, dtype=torch.int64)], [3, 5]
    for values in ([1.0, float("-inf"), 2.0], [float("inf"), 1.0], [float("-inf")] * 2, [float("nan"), 1.0]):
        yield "online softmax", [torch.tensor(values), nan(len(values))], [len(values)]
    for m, n in ((4, 4), (5, 7), (1, 9), (8, 3), (64, 67)):
        yield "transposing copy", [torch.randn(m, n), nan(n, m)], [m, n]
    for ends in ([0, 3, 3, 7, 8], [0, 0, 0], [0, 4], [2, 2]):
        yield "ragged rows", [torch.tensor(ends), torch.randn(12, 6), nan(len(ends) - 1, 6)], [len(ends) - 1]
    for counts in ([0, 4, 1, 3, 2, 0, 0, 1, 4, 4, 2], [4], [0, 0, 0]):
        yield "ragged lanes", [torch.tensor(counts), torch.randn(len(counts), 4), nan(len(counts))], [len(counts)]
    where = torch.tensor([5, 0, 5, 5, 2])
    yield "scatter-add", [where, torch.randn(5, 3), torch.randn(6, 3)], [5]
    yield "gather", [where, torch.randn(6), nan(5)], [5]
    yield "gather", [where.neg(), torch.randn(6), nan(5)], [5]


CASES = list(cases())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0].replace(" ", "-") for case in CASES])
def test_a_kernel_computes_what_the_oracle_does(case, threads):
    name, memory, sizes = CASES[case]
    assert_close(KERNELS[name], memory, sizes, threads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_outside_is_reported(threads):
    where = torch.zeros(50, dtype=torch.int64)
    where[37] = 6
    source, out = torch.randn(6), nan(50)
    assert native(GATHER)([where, source, out], [50], threads) == (1, (6, 6))
    assert native(SCATTER_ADD)([where, torch.randn(50, 3), torch.zeros(6, 3)], [50], threads) == (1, (6, 6))
    where[37] = -1
    assert native(SCATTER_ADD)([where, torch.randn(50, 3), torch.zeros(6, 3)], [50], threads) == (1, (-1, 6))


@pytest.mark.parametrize("target", PROCESSORS)
def test_other_machines_have_code_too(target):
    for source in KERNELS.values():
        text = kernel_text(parse_kernel(source), PROCESSORS[target], "kernel")
        assert object_code(text, PROCESSORS[target])[:4] == b"\x7fELF"


@pytest.mark.parametrize(("copies", "asked"), [(2, 1), (4, 1), (8, 2)])
def test_a_line_of_memory_is_asked_for_once(copies, asked):
    """Four floats are a quarter of a line: of so many copies every fourth asks."""
    source = changed(KERNELS["centred rows"], "vector(n, lanes=4, copies=2)", f"vector(n, lanes=4, copies={copies})")
    text = kernel_text(parse_kernel(source), PROCESSORS["portable-arm"], "kernel")
    blocks = [block.count("call void @llvm.prefetch.p0(") for block in text.split("\nloop")]
    assert max(blocks) == asked
