"""Scheduling as a list of steps: fuel stops it where it is told to, and a schedule that breaks a law is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.program import Sort
from ferrite.lower.graph import lower_module
from ferrite.pipeline import Fuel
from ferrite.schedule.laws import verify_schedule
from ferrite.schedule.plan import STEPS, make_plan
from ferrite.schedule.steps import ParallelRegion, Run
from ferrite.targets.cpu import CPU
from tests.lower.lowered import traced

pytestmark = pytest.mark.quick


def three_steps(x, w):
    return ((x @ w).relu().sum(-1, keepdim=True) + 1) @ w[:1]


def scheduled(fuel=None):
    """The plan, and the schedule after each step."""
    program = lower_module(traced(three_steps, torch.randn(16, 16), torch.randn(16, 16))).program
    seen = {}
    schedulings = {"cpu": CPU.scheduling}
    plan = make_plan(program, schedulings, verify=True, fuel=Fuel(fuel), observe=seen.__setitem__)
    return plan, seen


def test_every_step_is_seen_in_order_and_has_a_text():
    _plan, seen = scheduled()
    assert list(seen) == [step.__name__ for step in STEPS]
    assert "group on cpu" in str(seen["fuse"])
    assert "launch" in str(seen["reuse_in_place"])
    assert "run of" in str(seen["finish"])


def test_without_fuel_nothing_is_fused_and_nothing_reused():
    whole, _seen = scheduled()
    apart, _seen = scheduled(fuel=0)
    assert len(apart.launches) > len(whole.launches)
    assert not apart.in_place
    one, _seen = scheduled(fuel=1)
    assert len(one.launches) == len(apart.launches) - 1, "one unit is one fusion"


def broken(seen, change):
    """The finished schedule with its first run changed."""
    schedule = seen["finish"]
    place = next(place for place, item in enumerate(schedule.items) if isinstance(item.work, Run))
    items = list(schedule.items)
    items[place] = replace(items[place], work=change(items[place].work))
    return replace(schedule, items=tuple(items))


def test_a_broken_law_is_cited():
    _plan, seen = scheduled(fuel=0)
    verify_schedule(seen["finish"])
    cases = {
        "S1": lambda run: replace(run, launches=run.launches[:-1]),
        "S2": lambda run: replace(run, launches=(replace(run.launches[0], arguments=()), *run.launches[1:])),
        "S3": lambda run: replace(run, arena=0, offsets={run.launches[0].arguments[0]: 0}),
        "S5": lambda run: replace(run, parallel_regions=(ParallelRegion(0, len(run.launches) + 1, 2),)),
    }
    for law, change in cases.items():
        with pytest.raises(InvalidProgram, match=f"law {law}"):
            verify_schedule(broken(seen, change))


def test_a_sort_that_is_lost_is_named():
    program = lower_module(traced(lambda x: (x.sort(-1).values * 2).sin(), torch.randn(4, 5))).program
    seen = {}
    make_plan(program, {"cpu": CPU.scheduling}, verify=True, observe=seen.__setitem__)
    items = seen["finish"].items
    (sort,) = (item for item in items if isinstance(item.work, Sort))
    with pytest.raises(InvalidProgram, match="law S1: sort is in 0 items"):
        verify_schedule(replace(seen["finish"], items=tuple(item for item in items if item is not sort)))


def test_two_storages_at_the_same_bytes_at_once_are_named():
    _plan, seen = scheduled(fuel=0)

    def meeting(run):
        first, second = run.launches[0].arguments[:2]
        return replace(run, arena=1 << 20, offsets={first: 0, second: 0}, borrowed_space={})

    with pytest.raises(InvalidProgram, match="law S4"):
        verify_schedule(broken(seen, meeting))
