"""Random graphs and programs on a GPU, through the front door: those of `test_cpu.py` and `test_programs.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from bench.programs.generate import PROGRAMS, generate
from bench.programs.judge import judge
from tests.fuzz.test_cpu import NO_COLUMN, ONE_ELEMENT, ONE_ROW, Case, assert_same_results, cases
from tests.triton_kernels import ON_A_GPU

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("few_processes"), pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
STRICT = {"strict": True}
PARTS, A_FEW, MANY = 12, 6, 100


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", PROGRAMS)
def test_random_programs_are_eager(kind, part):
    for number in range(part, PARTS * A_FEW, PARTS):
        assert_fine(kind, number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", PROGRAMS)
def test_many_random_programs_are_eager(kind, part):
    for number in range(1000 + part, 1000 + PARTS * MANY, PARTS):
        assert_fine(kind, number)


def assert_fine(kind: str, number: int) -> None:
    program = generate(kind, number, DEVICE)
    verdict = judge(program)
    assert verdict.fault in ("", "torch"), f"seed {number}: {verdict.detail}\n\n{program.source()}"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs_compute_what_eager_does(part):
    for_every_case(part, A_FEW)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_graphs_compute_what_eager_does(part):
    for_every_case(1000 + part, MANY)


@pytest.mark.parametrize("case", [NO_COLUMN, ONE_ELEMENT, ONE_ROW], ids=str)
def test_graphs_that_were_wrong_once(case):
    assert_like_eager(case)


def for_every_case(number: int, count: int) -> None:
    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def check(case: Case) -> None:
        assert_like_eager(case)

    check()


def assert_like_eager(case: Case) -> None:
    inputs = case.inputs(DEVICE)
    kept = [each.clone() for each in inputs]
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: case(*given), backend="ferrite", dynamic=case.dynamic, options=STRICT)
    for _ in range(2):  # the first call goes another way than all others
        assert_same_results(case, inputs, compiled(*inputs))
    assert all(map(torch.equal, inputs, kept)), "inputs are left as they are"
