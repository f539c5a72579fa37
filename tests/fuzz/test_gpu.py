"""Random graphs of loops through the scheduler for GPUs: kernels in Triton's interpreter, compared with eager."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from ferrite.schedule.plan import make_plan
from tests.fuzz.test_cpu import NO_COLUMN, ONE_ELEMENT, ONE_ROW, Case, cases
from tests.gpu_plans import MACHINE, TINY, lowered, run_plan, scheduling

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
@example(ONE_ELEMENT)
@example(ONE_ROW)
@example(NO_COLUMN)
@example(Case((0, 0), ("contiguous",), (("decay", 0),), 1, False))
@example(Case((3, 3, 0), ("contiguous",), (("decay", 0),), 1, False))
@example(Case((1,), ("contiguous",), (("running sum", 0, 0), ("decay", 1)), 1, False))
def test_a_random_graph_computes_what_eager_does(case: Case) -> None:
    assert_as_eager(case, TINY)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [MACHINE, TINY], ids=["large", "tiny"])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_many_random_graphs_compute_what_eager_does(case: Case, machine) -> None:
    assert_as_eager(case, machine)


def assert_as_eager(case: Case, machine) -> None:
    inputs = case.inputs()
    kept = [each.clone() for each in inputs]
    eager = case(*inputs)
    made = lowered(case, *inputs, dynamic=case.dynamic)
    plan = make_plan(made.program, {"cpu": scheduling(machine)}, verify=True)
    assert not plan.not_compiled, "every loop has a kernel"
    ours = run_plan(plan, inputs, made.objects)
    assert all(map(torch.equal, inputs, kept)), "inputs are left as they are"
    exact = case.values([each.double() for each in inputs])
    largest = max((value.abs().max().item() for value in exact if value.numel()), default=0.0)
    for mine, theirs in zip(ours, eager, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * (1 + largest), equal_nan=True)
