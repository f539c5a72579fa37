"""Memory of a plan: what a run needs for itself lies in one block, and things that live at once lie apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule.plans import memory, plan_of, runs

from ferrite.ir.index import symbol
from ferrite.schedule.memory import bytes_of, with_arena
from ferrite.schedule.steps import Launch, Run
from ferrite.schedule.touches import Layouts
from loop_programs import buffer, program

quick = pytest.mark.quick
SIZE = symbol("s0", 2, 1024)


def lifetimes(run: Run) -> dict[str, tuple[int, int]]:
    """For each storage in the block, the first and the last launch that touch it."""
    spans: dict[str, tuple[int, int]] = {}
    for place, launch in enumerate(run.launches):
        for name in launch.arguments:
            spans[name] = (spans.get(name, (place, place))[0], place)
    return {name: spans[name] for name in run.offsets}


def assert_well_laid(run: Run, sizes: dict[str, int]) -> None:
    spans = lifetimes(run)
    greatest = 0
    for name, (first, last) in spans.items():
        beside = [other for other, (start, stop) in spans.items() if start <= last and first <= stop]
        greatest = max(greatest, sum(sizes[other] for other in beside))
        begin, end = run.offsets[name], run.offsets[name] + sizes[name]
        assert begin % 64 == 0
        assert end <= run.arena
        for other in set(beside) - {name}:
            assert end <= run.offsets[other] or run.offsets[other] + sizes[other] <= begin, f"{name} lies over {other}"
    assert run.arena <= greatest, "more than what lives at once"


def deep(x):
    """Running sums of running sums: each is read once, from its end, then its memory is free."""
    for axis in (0, 1, 0, 1, 0):
        x = x.flip(axis).cumsum(axis)
    return x


@quick
def test_memory_is_used_again_in_a_run():
    plan = plan_of(deep, torch.randn(32, 64), fuse=False)
    (run,) = runs(plan)
    layouts = Layouts(plan.program)
    sizes = {name: bytes_of(name, layouts) for name in run.offsets}
    kept = {plan.taken.get(name, name) for name in plan.program.outputs}
    assert set(run.offsets) == memory(plan) - kept, "all but the result"
    assert_well_laid(run, sizes)
    assert run.arena < sum(sizes.values()), "nothing is used again"


@quick
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_what_lives_at_once_lies_apart(parts, foreign):
    names = [f"b{number}" for number in range(len(parts))]
    shell = program(
        buffers=[buffer(name, size) for name, (size, *_) in zip(names, parts, strict=True)], outputs=(), inputs=()
    )
    layouts = Layouts(shell)
    touched: list[list[str]] = [[] for _ in range(6)]
    for name, (_, one, other) in zip(names, parts, strict=True):
        for place in {one, other}:
            touched[place].append(name)
    launches = tuple(Launch(None, tuple(each), (), ()) for each in touched)  # type: ignore[arg-type]
    own = {name for number, name in enumerate(names) if number not in foreign}
    run = with_arena(Run(launches), own, layouts)
    assert set(run.offsets) == own, "what others touch too has memory of its own"
    assert_well_laid(run, {name: bytes_of(name, layouts) for name in own})


@quick
def test_results_and_what_others_touch_are_not_in_the_block():
    plan = plan_of(lambda x, w: (x.softmax(0) @ w, x.softmax(0)), torch.randn(32, 64), torch.randn(64, 8))
    inside = {name for run in runs(plan) for name in run.offsets}
    assert inside.isdisjoint(plan.program.outputs)
    called = {name for step in plan.steps if not isinstance(step, Run) for name in step.call.results}
    assert called
    assert inside.isdisjoint(called)


@quick
def test_memory_of_a_size_that_is_not_known_is_not_planned():
    plan = plan_of(lambda x: x.softmax(0), torch.randn(32, 64), fuse=False)
    (run,) = runs(plan)
    assert run.offsets
    unknown = replace(
        plan.program,
        buffers=tuple(
            replace(each, sizes=(each.sizes[0] * SIZE, *each.sizes[1:])) if each.name in run.offsets else each
            for each in plan.program.buffers
        ),
    )
    again = with_arena(Run(run.launches), set(run.offsets), Layouts(unknown))
    assert (again.arena, again.offsets) == (0, {})


@quick
def test_names_die_with_their_last_use():
    plan = plan_of(lambda x, w: torch.relu((x + 1) @ w).sin() @ w, torch.randn(8, 8), torch.randn(8, 8))
    dying = [name for names in plan.dying for name in names]
    assert len(dying) == len(set(dying)), "each dies once"
    last = {}
    for place, step in enumerate(plan.steps):
        used = (
            {name for launch in step.launches for name in launch.arguments}
            if isinstance(step, Run)
            else {str(each.name) for each in step.call.args if hasattr(each, "name")} | set(step.call.results)
        )
        used |= {plan.taken[name] for name in used if name in plan.taken}
        last.update(dict.fromkeys(used, place))
    for place, names in enumerate(plan.dying):
        assert all(last[name] == place for name in names)
    assert set(last) - set(dying) == set(plan.program.outputs) | {
        name for run in runs(plan) for name in run.offsets if name not in dying
    }
