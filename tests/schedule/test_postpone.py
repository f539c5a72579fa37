"""Small kernels whose results only leave wait for the end of a program, where equal ones are one launch on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ferrite.pipeline import Fuel
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Run
from tests.gpu_plans import assert_as_eager, lowered, plan_of, scheduling
from tests.schedule.plans import plan_of as plan_for_a_processor
from tests.schedule.test_grouping import problems
from tests.schedule.test_horizontal import PIECES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
torch.manual_seed(0)


def gradients(x, *weights):
    """As a backward pass: a product for each layer, and the gradient of what it has for each column. Each layer needs
    the whole product before it, so that sums of two do not become one."""
    sums = []
    for weight in weights:
        x = (x @ weight).softmax(-1)
        sums.append((x * x).sum(0))
    return [x, *sums]


def given(layers: int, columns: int = 16) -> list[torch.Tensor]:
    return [torch.randn(32, columns), *(torch.randn(columns, columns) for _ in range(layers))]


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "kernels"])
def test_pieces_of_all_layers_are_added_up_at_the_end(triton):
    plan = assert_as_eager(gradients, *given(5), machine=PIECES, calls=True, triton=triton)
    assert problems(plan)[-1] == 5
    assert problems(plan).count(0) == len(problems(plan)) - 1
    *_, last = [step for step in plan.steps if isinstance(step, Run)]
    assert last.launches[-1].kernel.problems, "in the last run, not in one of its own"


def test_a_few_stay_where_they_are():
    few = PIECES.min_grouped_launches - 1
    plan = assert_as_eager(gradients, *given(few), machine=PIECES, calls=True)
    assert not any(problems(plan))
    runs = [len(step.launches) for step in plan.steps if isinstance(step, Run)]
    assert len(runs) == few
    assert runs[0] == runs[-1]


def read_again(x, *weights):
    first, *sums = gradients(x, *weights)
    return [first @ torch.stack(sums).t(), *sums]


def test_what_the_program_reads_does_not_wait():
    plan = assert_as_eager(read_again, *given(5), machine=PIECES, calls=True)
    *_, last = [step for step in plan.steps if isinstance(step, Run)]
    assert len(last.launches) <= 5  # the last layer's, and what is read: none of the sums is left for the end


@pytest.mark.parametrize(("pieces", "wait"), [(0, 0), (1, 0), (5, 5), (9, 9)])
def test_memory_that_is_kept_is_limited(pieces, wait):
    """For so many layers; where these are too few, nothing is one launch."""
    one = 16 * 16 * 4  # bytes of the pieces of a layer
    plan = plan_of(gradients, *given(9), machine=replace(PIECES, max_postponed_bytes=pieces * one))
    assert max(problems(plan)) == wait


def test_large_ones_do_not_wait():
    assert not any(problems(plan_of(gradients, *given(5), machine=replace(PIECES, max_bytes_between=64))))


def test_inputs_are_changed_where_they_were():
    """What runs in between may fail, and then the same inputs are changed as in eager."""

    def running(x, *tensors):
        weights, statistics = tensors[:5], tensors[5:]
        for weight, mean in zip(weights, statistics, strict=True):
            x = (x @ weight).softmax(-1)
            mean.copy_(x.sum(0))
        return x

    plan = plan_of(running, *given(5), *(torch.zeros(16) for _ in range(5)), machine=PIECES)
    assert not any(problems(plan))


def test_each_that_waits_spends_fuel():
    program = lowered(gradients, *given(5)).program

    def in_last_run(amount: int) -> int:
        plan = make_plan(program, {"cpu": scheduling(PIECES)}, verify=True, fuel=Fuel(amount))
        return len([step for step in plan.steps if isinstance(step, Run)][-1].launches)

    counts = [in_last_run(amount) for amount in range(12, 24)]
    assert max(counts) == 7, "one more for each of the first four"
    assert counts[-1] == 3, "then they are one"


def test_a_processor_runs_them_at_once():
    launches = [
        len(step.launches) for step in plan_for_a_processor(gradients, *given(5)).steps if isinstance(step, Run)
    ]
    assert len(set(launches[1:])) == 1


def test_sizes_that_are_known_at_run_time():
    plan = plan_of(gradients, *given(5), machine=PIECES, dynamic=True)
    assert not any(problems(plan))
