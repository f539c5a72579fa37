"""Kernels of a GPU that need nothing of each other are one, where starting them takes the time; order stays right."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.horizontal import HorizontalFusion
from ferrite.schedule.steps import Run
from tests.gpu_plans import assert_as_eager, lowered, plan_of, run_plan

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
torch.manual_seed(0)
# So small that sums of a few rows are done in pieces.
PIECES = GpuMachine(
    multiprocessors=64,
    min_split_elements=64,
    one_program_elements=32,
    one_program_points=0,
    min_piece_elements=8,
    line_bytes=16,
)


def kernels(plan):
    """How many kernels each run has."""
    return [len(step.launches) for step in plan.steps if isinstance(step, Run)]


def turned(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rotary(x, wq, wk, cos, sin):
    """Queries and keys turned by their places, each behind its product."""
    q = turned((x @ wq).view(4, 3, 8), cos, sin)
    k = turned((x @ wk).view(4, 3, 8), cos, sin)
    return torch.bmm(q, k.mT)


ROTARY = [torch.randn(12, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(3, 8), torch.randn(3, 8)]


def gradients(dq, dk, w):
    """Those of two layers: products, and the biases' sums."""
    return dq @ w, dq.sum(0), dk @ w, dk.sum(0)


GRADIENTS = [torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 16)]


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
def test_queries_and_keys_are_turned_by_one_kernel(dynamic):
    plan = assert_as_eager(rotary, *ROTARY, calls=True, dynamic=dynamic)
    assert kernels(plan) == [1]


@needs_triton
def test_sums_of_columns_and_of_their_pieces_are_one_kernel_each():
    plan = assert_as_eager(gradients, *GRADIENTS, machine=PIECES, calls=True)
    assert kernels(plan) == [2]


def other_rows(x, y, w):
    return x * 2, y @ w, y * 2


def too_much(x, y, w):
    return x.sin(), x @ w, y.sin()


def needed_between(x, y, w):
    z = x.sin()
    return z @ w, y.sin()


def written_between(x, y, w):
    z = x * 2
    x.copy_(y @ w)
    return z, x * 3, y * 2


def reads_what_the_other_makes(x, y, w):
    z = x.sin()
    u = torch.mm(z, w)
    return u, (y * u).cos()


def leaves_its_run(x, y, w):
    """Sums in pieces have memory of the run: the last step stays there."""
    return x.sum(0), (x @ w) @ w, (y @ w).sum(0)


SQUARE = [torch.randn(16, 16) for _ in range(3)]
MANY_PROGRAMS = GpuMachine(one_program_points=0)
APART = {
    "other rows": (other_rows, [torch.randn(8, 16), *SQUARE[:2]], MANY_PROGRAMS, [1, 1]),
    "too much memory": (too_much, SQUARE, GpuMachine(one_program_points=0, small_bytes=2048), [1, 1]),
    "needed between, so the other one goes up": (needed_between, SQUARE, MANY_PROGRAMS, [1]),
    "written between": (written_between, SQUARE, MANY_PROGRAMS, None),
    "one needs the other": (reads_what_the_other_makes, SQUARE, MANY_PROGRAMS, [1, 1]),
    "memory of a run": (leaves_its_run, [torch.randn(32, 16), torch.randn(32, 16), SQUARE[0]], PIECES, [2, 2]),
}


@needs_triton
@pytest.mark.parametrize("name", APART)
def test_order_stays_right(name):
    function, inputs, machine, expected = APART[name]
    plan = assert_as_eager(function, *inputs, machine=machine, calls=True)
    assert expected is None or kernels(plan) == expected


def test_steps_between_see_what_they_need():
    """The same without Triton: memory that is written later is read before, whatever kernels are united."""
    inputs = [each.clone() for each in SQUARE]
    made = lowered(written_between, *inputs)
    results = run_plan(plan_of(written_between, *inputs), [each.clone() for each in inputs], made.objects, triton=False)
    torch.testing.assert_close(results[-3:], list(written_between(*inputs)), check_stride=False)


def random_program(choose):
    """Elementwise calls, sums of columns, products and writes of inputs, in any order."""
    steps = [(choose.choice(STEPS), choose.randrange(99), choose.randrange(99)) for _ in range(14)]

    def function(*inputs):
        values = list(inputs)
        for step, one, other in steps:
            made = step(values[one % len(values)], values[other % len(values)], inputs[other % len(inputs)])
            values += [] if made is None else [made]
        return tuple(values[len(inputs) :]) or (inputs[0] + 1,)

    return function


STEPS = (
    lambda x, y, _: x.sin() * 2,
    lambda x, y, _: x * 3 - 1,
    lambda x, y, _: x + y,
    lambda x, y, _: x @ y / 8,
    lambda x, y, _: x.t() @ y / 8,
    lambda x, y, _: x.sum(0) + torch.zeros(8, 8),
    lambda x, y, _: (x * y).sum(0).expand(8, 8) / 8,
    lambda x, y, written: write(written, x.cos()),
    lambda x, y, written: write(written, (x @ y) / 8),
)


def write(written, value):
    written.copy_(value)


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_compute_what_they_do_apart(seed, monkeypatch):
    """To the bit: the same kernels' loops, in another order."""
    function = random_program(random.Random(seed))
    torch.manual_seed(seed)
    inputs = [torch.randn(8, 8) for _ in range(3)]
    objects = lowered(function, *inputs).objects
    found = []
    for united in (True, False):
        if not united:
            monkeypatch.setattr(HorizontalFusion, "run", lambda self: None)
        plan = plan_of(function, *inputs, machine=PIECES)
        found.append(run_plan(plan, [each.clone() for each in inputs], objects, triton=False))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
