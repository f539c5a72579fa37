"""Which matrix products are kernels of our own: what was measured decides, and the record of that is held here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ferrite.ir import sum_pieces
from ferrite.machines import BesideArmComputeLibrary, BesideMkl, GpuMachine, MatrixProduct, beside_cublas
from ferrite.schedule.gpu.products import config_for
from ferrite.tune import Measured, ProductProblem, parsed

quick = pytest.mark.quick
RESULTS = Path(__file__).parents[2] / "bench" / "results"
ON_ARM = ("products-aarch64.md", "products-2-threads-aarch64.md")
ON_X86 = ("products-x86_64.md", "products-16-threads-x86_64.md")
ALONG = ("linear", "frozen", "layer", "scores")  # both factors lie along what is summed
NOISE = 1.02
BESIDE_ACL, BESIDE_MKL = BesideArmComputeLibrary(), BesideMkl()
H200 = beside_cublas("NVIDIA H200")


def measured(records: Sequence[str]) -> list[tuple[str, list[int], float]]:
    """Kind, rows and inner and columns, and our time to torch's."""
    found = []
    for line in "\n".join((RESULTS / record).read_text() for record in records).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1][:1].isdigit():
            found.append((cells[0], [int(size) for size in cells[1].split(",")][-3:], float(cells[4].split()[0])))
    return found


def given(sizes: Sequence[int], kind: str) -> MatrixProduct:
    rows, inner, columns = sizes
    return MatrixProduct(rows, inner, columns, lie_along=kind in ALONG, in_panels=kind == "frozen")


def is_taken_on_arm(kind: str, sizes: Sequence[int]) -> bool:
    return BESIDE_ACL.product(given(sizes, kind)) is None


def is_taken_on_x86(kind: str, sizes: Sequence[int]) -> bool:
    return BESIDE_MKL.product(given(sizes, kind)) is None


@quick
@pytest.mark.parametrize(("records", "is_taken"), [(ON_ARM, is_taken_on_arm), (ON_X86, is_taken_on_x86)])
def test_nothing_is_taken_that_was_measured_to_be_slower(records, is_taken):
    rows = measured(records)
    assert len(rows) > 80
    assert any(is_taken(kind, sizes) for kind, sizes, _ in rows)
    for kind, sizes, ratio in rows:
        if is_taken(kind, sizes):
            assert ratio <= NOISE, (kind, sizes)


@quick
def test_most_of_what_was_measured_to_be_faster_is_taken():
    faster = [(kind, sizes) for kind, sizes, ratio in measured(ON_ARM) if ratio < 0.9]
    taken = [sizes for kind, sizes in faster if is_taken_on_arm(kind, sizes)]
    assert len(taken) > 0.6 * len(faster)


@quick
def test_a_reason_is_given():
    assert "small" in str(BESIDE_ACL.product(MatrixProduct(5, 4, 6, True)))
    assert "thin" in str(BESIDE_ACL.product(MatrixProduct(4, 768, 768, False)))
    assert "large" in str(BESIDE_ACL.product(MatrixProduct(512, 768, 768, False)))
    assert BESIDE_ACL.product(MatrixProduct(128, 768, 768, True)) is None


@quick
def test_beside_mkl_few_rows_of_frozen_weights_are_taken():
    assert BESIDE_MKL.product(MatrixProduct(16, 768, 768, True, in_panels=True)) is None
    assert "not frozen" in str(BESIDE_MKL.product(MatrixProduct(16, 768, 768, True, in_panels=False)))
    assert "many rows" in str(BESIDE_MKL.product(MatrixProduct(128, 768, 768, True, in_panels=True)))
    assert "small" in str(BESIDE_MKL.product(MatrixProduct(16, 64, 64, True, in_panels=True)))
    assert BESIDE_MKL.product(MatrixProduct(1, 768, 768, True, in_panels=False)) is None
    assert "not frozen" in str(BESIDE_MKL.product(MatrixProduct(1, 768, 768, False, in_panels=False)))


@quick
def test_pieces_of_sums_are_equal_and_neither_long_nor_short():
    for length in range(1, 4096):
        piece = sum_pieces.of_product(length)
        assert length % piece == 0
        if sum_pieces.product_can_be_cut(length):
            assert piece == length or 128 <= piece <= 512
        else:
            assert not any(length % size == 0 for size in range(128, 513))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def measured_on_gpu() -> dict[ProductProblem, Measured]:
    return dict(parsed((RESULTS / "gpu-products.txt").read_text()).products)


@quick
def test_on_a_gpu_nothing_is_taken_that_was_measured_to_be_slower():
    taken = {problem: found for problem, found in measured_on_gpu().items() if H200.product(problem) is None}
    assert {problem.rows for problem in taken} == {1, 2, 4, 8, 16}
    assert all(found.ours < 0.9 * found.torch for found in taken.values())
    assert all(beside_cublas("another GPU").product(problem) is not None for problem in taken)


@quick
def test_on_a_gpu_a_reason_is_given():
    layer = ProductProblem("bf16", 1, 8, 4096, 4096, "summed", "summed")
    assert H200.product(layer) is None
    assert "few rows" in str(H200.product(replace(layer, rows=64)))
    assert "few rows" in str(H200.product(replace(layer, dtype="f32")))
    assert "lie so" in str(H200.product(replace(layer, right="columns")))
    assert "lie so" in str(H200.product(replace(layer, columns=4100)))
    assert "that size" in str(H200.product(replace(layer, columns=14336)))


@quick
def test_what_is_taken_on_a_gpu_is_arranged_as_was_fastest():
    for problem, found in measured_on_gpu().items():
        if H200.product(problem) is None and problem.rows > 1:
            best = replace(found.config, in_column=1)
            assert config_for(problem, GpuMachine(), {}) == best, problem
