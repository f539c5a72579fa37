"""Memory of a plan: what a run needs for itself lies in one block, and things that live at once lie apart."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.ir.index.algebra import symbol
from ferrite.lower.graph import lower_module
from ferrite.schedule.cpu import CpuScheduling
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.memory.arena import ALWAYS, Arenas, Host, bytes_of, meet, spans_of, with_places
from ferrite.schedule.memory.liveness import last_uses_of
from ferrite.schedule.memory.peak import bytes_by_step
from ferrite.schedule.memory.split_runs import bytes_or_zero
from ferrite.schedule.steps import Launch, Plan, Run
from ferrite.targets.cpu import CPU
from tests.executables import function_of
from tests.loop_programs import buffer, program
from tests.lower.lowered import traced
from tests.schedule.plans import MACHINE, make, memory, plan_of, runs

ALIGNMENT = MACHINE.line_bytes

quick = pytest.mark.quick
SIZE = symbol("s0", 2, 1024)


def assert_well_laid(run: Run, sizes: dict[str, int]) -> None:
    """What lives at once lies apart: in the block, and in tensors, with what these are needed for themselves."""
    spans = spans_of(run)
    rooms: dict[str, list[str]] = {}
    for name in {*run.offsets, *run.borrowed_space}:
        home, begin = run.borrowed_space.get(name, ("the block", run.offsets.get(name, 0)))
        rooms.setdefault(home, []).append(name)
        assert begin % 64 == 0
        assert begin + sizes[name] <= (run.arena if home == "the block" else sizes[home])
        assert home == "the block" or not meet(spans[name], spans[home]), f"{home} is needed itself"
    for members in rooms.values():
        for one, other in itertools.permutations(members, 2):
            if meet(spans[one], spans[other]):
                low, high = place_of(run, one), place_of(run, other)
                assert low + sizes[one] <= high or high + sizes[other] <= low, f"{one} lies over {other}"
    live = [sum(sizes[name] for name in run.offsets if meet(spans[name], (at, at))) for at in range(len(run.launches))]
    assert run.arena <= 1.5 * max(live), "a third of it lies idle whatever runs"


def place_of(run: Run, name: str) -> int:
    return run.offsets[name] if name in run.offsets else run.borrowed_space[name][1]


def deep(x):
    """Running sums of running sums: each is read once, from its end, then its memory is free."""
    for axis in (0, 1, 0, 1, 0):
        x = x.flip(axis).cumsum(axis)
    return x


@quick
def test_memory_is_used_again_in_a_run():
    plan = plan_of(deep, torch.randn(32, 64), fuse=False)
    (run,) = runs(plan)
    kept = {plan.in_place.get(name, name) for name in plan.program.outputs}
    inside = {*run.offsets, *run.borrowed_space}
    assert inside == memory(plan) - kept, "all but the result"
    buffer_table = BufferTable(plan.program)
    sizes = {name: bytes_of(name, buffer_table, ALIGNMENT) for name in inside | kept}
    assert_well_laid(run, sizes)
    assert run.arena == 32 * 64 * 4, "what one reads while another is written, every second time in the result"
    assert len(run.borrowed_space) == 2


@quick
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
)
def test_what_lives_at_once_lies_apart(parts, made, last_uses):
    names = [f"b{number}" for number in range(len(parts))]
    shell = program(
        buffers=[buffer(name, size) for name, (size, *_) in zip(names, parts, strict=True)], outputs=(), inputs=()
    )
    buffer_table = BufferTable(shell)
    accessed: list[list[str]] = [[] for _ in range(6)]
    for name, (_, one, other) in zip(names, parts, strict=True):
        for place in {one, other}:
            accessed[place].append(name)
    run = Run(tuple(Launch(None, tuple(each), (), ()) for each in accessed))
    spans = spans_of(run)
    hosts = [Host(name, (spans[name][0], ALWAYS)) for number, name in enumerate(names) if number in made]
    hosts += [Host(name, (-ALWAYS, spans[name][1])) for number, name in enumerate(names) if number in last_uses - made]
    own = {name for number, name in enumerate(names) if number not in made | last_uses}
    planned = with_places(run, own, hosts, buffer_table, ALIGNMENT)
    assert {*planned.offsets, *planned.borrowed_space} == own, "what others touch too has memory of its own"
    assert_well_laid(planned, {name: bytes_of(name, buffer_table, ALIGNMENT) for name in names})


@quick
def test_results_and_what_others_touch_are_not_in_the_block():
    plan = plan_of(lambda x, w: (x.softmax(0) @ w, x.softmax(0)), torch.randn(32, 64), torch.randn(64, 8))
    inside = {name for run in runs(plan) for name in (*run.offsets, *run.borrowed_space)}
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
    again = with_places(Run(run.launches), {*run.offsets}, [], BufferTable(unknown), ALIGNMENT)
    assert (again.arena, again.offsets) == (0, {})


@quick
def test_memory_of_a_size_that_is_not_known_is_used_again():
    plan = plan_of(deep, torch.randn(32, 64), fuse=False, dynamic=True)
    (run,) = runs(plan)
    tensors = memory(plan) - {*run.borrowed_space}
    assert not run.offsets
    assert len(tensors) == 2, "one that is read, one that is written"


# --- taking over ------------------------------------------------------------------------------------------------------

MATRIX, WEIGHT = torch.randn(48, 64), torch.randn(64, 64)


def softmax(x, w):
    return (x @ w).softmax(-1)


def after_a_view(x, w):
    return torch.relu((x @ w).view(6, 8, 64)) + 1


def twice(x, w):
    return (torch.relu(x @ w) @ w).tanh() @ w


def sums_of_sums(x, w):
    return (x @ w).cumsum(1).cumsum(0)


def several(x, w):
    first, second = x @ w, x.sin() @ w
    return first * second, first - second


TAKING = {softmax: 1, after_a_view: 1, twice: 2, sums_of_sums: 1, several: 1}


def both_pointers(plan: Plan) -> int:
    return sum(pointer.access == "both" for launch in plan.launches for pointer in launch.kernel.pointers)


@quick
@pytest.mark.parametrize("fn", TAKING, ids=lambda fn: fn.__name__)
def test_a_kernel_writes_where_it_reads_for_the_last_time(fn):
    plan = plan_of(fn, MATRIX, WEIGHT)
    assert len(plan.in_place) == both_pointers(plan) == TAKING[fn]
    for launch in plan.launches:
        assert len(set(launch.arguments)) == len(launch.arguments), "one pointer for both"


def read_elsewhere(x, w):
    return (x @ w).flip(0) + 1


def read_in_other_rows(x, w):
    y = x @ w
    return y - y.mean(0)


def needed_later(x, w):
    y = x @ w
    return (y.sin() @ w) @ y.T


def returned_too(x, w):
    y = x @ w
    return y, y.sin()


def view_returned_too(x, w):
    y = x @ w
    return y[3:], y.sin()


def of_another_size(x, w):
    return (x @ w)[:, :32] * 2


def of_another_type(x, w):
    return (x @ w).int()


def of_the_caller(x, w):
    return x.sin() @ w


def read_after_it_is_written(x, w):
    y = x @ w
    z = y.exp()
    return z, (z.sum(-1, keepdim=True) * y).sum(-1)


def returned_by_a_call(x, w):
    y = torch.native_dropout(x @ w, 0.5, False)[0]
    return y + 1


def several_sums(x, w):
    y = deep(x @ w)
    return deep(y[:8]), deep(y.flip(1))


def sums(x, w):
    """First something large is summed up, then something large is made."""
    y = x @ w
    return y.cumsum(0).sum(0), torch.cat([w.sin(), w.cos().flip(0)])


LEAVING = (
    read_elsewhere, needed_later, returned_too, view_returned_too, of_another_size, of_another_type, of_the_caller,
)  # fmt: skip


@quick
@pytest.mark.parametrize("fn", LEAVING, ids=lambda fn: fn.__name__)
def test_memory_that_is_still_needed_is_not_taken(fn):
    plan = plan_of(fn, MATRIX, WEIGHT)
    assert both_pointers(plan) == 0
    assert plan.launches


@pytest.mark.parametrize(
    "fn",
    [*TAKING, *LEAVING, read_in_other_rows, read_after_it_is_written, returned_by_a_call, several_sums, sums],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_taken_over_is_right(fn, fuse, dynamic):
    torch.manual_seed(0)
    x, w = torch.randn(48, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64) / 8
    module = lower_module(traced(fn, x, w, dynamic=dynamic))
    plan = make(module.program, fuse, CPU.scheduling.machine)
    kept = x.clone(), w.clone()
    ours = function_of(plan, module.objects)([x, w])
    assert all(map(torch.equal, (x, w), kept)), "inputs are left as they are"
    eager = fn(x, w)
    for mine, theirs in zip(ours, eager if isinstance(eager, tuple) else (eager,), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


# --- runs that are parted ---------------------------------------------------------------------------------------------


def test_a_run_does_not_hold_what_it_read_beside_what_it_will_write():
    plan = plan_of(sums, torch.randn(512, 512), torch.randn(512, 512), fuse=False)
    sizes = [max(bytes_by_step(plan.program, plan.steps, plan.last_uses, bytes_or_zero))]
    whole = [step for step in plan.steps if not isinstance(step, Run)]
    whole.append(Run(tuple(plan.launches)))
    last_uses = last_uses_of(plan.program, whole, BufferTable(plan.program))
    arenas = Arenas(plan.program, BufferTable(plan.program), {"cpu": CpuScheduling(MACHINE)})
    parallel_regions = bytes_by_step(plan.program, arenas.planned(whole), last_uses, bytes_or_zero)
    assert len(runs(plan)) > 1
    assert sizes[0] + (1 << 17) <= max(parallel_regions)


# --- lifetimes --------------------------------------------------------------------------------------------------------


@quick
def test_names_die_with_their_last_use():
    plan = plan_of(lambda x, w: torch.relu((x + 1) @ w).sin() @ w, torch.randn(8, 8), torch.randn(8, 8))
    last_uses = [name for names in plan.last_uses for name in names]
    assert len(last_uses) == len(set(last_uses)), "each dies once"
    last = {}
    for place, step in enumerate(plan.steps):
        used = (
            {name for launch in step.launches for name in launch.arguments}
            if isinstance(step, Run)
            else {str(each.name) for each in step.call.args if hasattr(each, "name")} | set(step.call.results)
        )
        used |= {plan.in_place[name] for name in used if name in plan.in_place}
        last.update(dict.fromkeys(used, place))
    for place, names in enumerate(plan.last_uses):
        assert all(last[name] == place for name in names)
    assert set(last) - set(last_uses) == set(plan.program.outputs) | {
        name for run in runs(plan) for name in (*run.offsets, *run.borrowed_space) if name not in last_uses
    }


@quick
def test_what_is_added_up_by_index_is_one_tensor_before_there_is_a_target():
    def fn(x, y, w, index):
        return torch.zeros(4096, 64).index_put((index,), (x @ w) * (y @ w), accumulate=True)

    x, index = torch.randn(1024, 64), torch.randint(4096, (1024,))
    plan = plan_of(fn, x, x.clone(), torch.randn(64, 64), index)
    most = max(bytes_by_step(plan.program, plan.steps, plan.last_uses, bytes_or_zero))
    assert most == 4 * (4096 * 64 + 1024 * 64), "the target and one source"


@quick
def test_what_was_given_away_is_freed_with_its_last_use():
    names = [buffer("given", 1024, kind="donated"), buffer("new", 1024)]
    found = program(buffers=names, outputs=("new",), inputs=("given",))
    launch = Launch(None, ("new", "given"), (), ())
    steps = [Run((launch,))]
    last_uses = last_uses_of(found, steps, BufferTable(found))
    assert bytes_by_step(found, steps, last_uses, bytes_or_zero) == [4096, 0], "one came, one went"
