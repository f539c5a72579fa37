"""Which kernels of a run share a parallel region: those that are independent, cannot fail, and are small."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bench.cases import pointwise
from ferrite.ir.kernel.nodes import may_stop
from ferrite.schedule.cpu.parallel_regions import Bytes, ParallelRegions, work_in
from ferrite.schedule.fusion.accesses import BufferTable
from tests.schedule.plans import MACHINE, number, plan_of, runs

Tensor = torch.Tensor
pytestmark = [pytest.mark.quick, pytest.mark.lengthy]
SIZES = [64, 100, 3000, 4096, 5000, 6000, 6500, 7000]


def each(*tensors: Tensor) -> list[Tensor]:
    """One kernel for each, of some grains: sizes differ, so nothing is fused."""
    return [x.sin().exp().tanh().cos().exp().sin().tanh().exp().sin().tanh().cos() for x in tensors]


def vectors(*sizes: int) -> list[Tensor]:
    return [torch.rand(size) for size in sizes]


def adam(*tensors: Tensor) -> list[Tensor]:
    """The step of an optimizer in place, over lists of tensors."""
    count = len(tensors) // 4
    parameters, gradients, means, squares = (list(tensors[at : at + count]) for at in range(0, 4 * count, count))
    pointwise.adam(parameters, gradients, means, squares)
    return []


# --- what shares a region ---------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_the_step_of_an_optimizer_over_many_tensors_is_one_region():
    sizes = [64 * 2 ** (place % 7) for place in range(100)]
    plan = plan_of(adam, *(tensor for _ in range(4) for tensor in vectors(*sizes)))
    (run,) = runs(plan)
    assert len(run.launches) == 100
    assert [(item.first, item.count) for item in run.parallel_regions] == [(0, 100)]
    assert plan.regions == [0] * 100


def test_the_longest_kernel_is_the_first_of_its_region():
    (run,) = runs(plan_of(each, *vectors(*SIZES)))
    work = [work_in(launch.kernel.body) for launch in run.launches]
    assert len(run.parallel_regions) == 1
    assert work == sorted(work, reverse=True)


def test_as_many_threads_as_have_enough_to_do():
    (run,) = runs(plan_of(each, *vectors(*range(500, 530))))
    work = [work_in(launch.kernel.body) for launch in run.launches]
    (found,) = run.parallel_regions
    assert 2 < found.threads == 1 + (sum(work) - max(work)) // MACHINE.grain < 30


def test_large_kernels_stay_alone_and_others_go_past_them():
    large = 1 << 20
    plan = plan_of(each, *vectors(3000, large, 4096, large + 1, 5000, 6000))
    (run,) = runs(plan)
    (found,) = run.parallel_regions
    assert (found.first, found.count) == (0, 4)
    assert plan.regions == [0, 0, 0, 0, None, None]
    sizes = [number(buffer.sizes[0]) for launch in run.launches for buffer in plan.program.buffers
             if buffer.name == launch.arguments[0]]  # fmt: skip
    assert sizes == [6000, 5000, 4096, 3000, large, large + 1], "the large ones in their order"


def test_what_is_large_for_few_is_one_of_many():
    few, many = (runs(plan_of(each, *vectors(*range(30_000, 30_000 + count)))) for count in (3, 20))
    assert not few[0].parallel_regions
    assert [item.count for item in many[0].parallel_regions] == [20]


# --- near misses ------------------------------------------------------------------------------------------------------


def test_kernels_that_wait_for_each_other_are_in_different_regions():
    def function(*tensors: Tensor) -> list[Tensor]:
        sums = [x.sum() for x in each(*tensors)]
        return [*sums, *(x * total for x, total in zip(each(*tensors), sums, strict=True))]

    (run,) = runs(plan_of(function, *vectors(*SIZES), fuse=False))
    assert [item.count for item in run.parallel_regions] == [len(SIZES), len(SIZES)]
    for region in run.parallel_regions:
        members = run.launches[region.first : region.first + region.count]
        for one, other in itertools.permutations(members, 2):
            written = {name for pointer, name in zip(one.kernel.pointers, one.arguments, strict=True)
                       if pointer.access != "read"}  # fmt: skip
            assert written.isdisjoint(other.arguments)


def test_a_chain_is_one_after_the_other():
    def function(x: Tensor) -> Tensor:
        for _ in range(5):
            x = (x - x.sum()).exp().flip(0)
        return x

    (run,) = runs(plan_of(function, torch.rand(7000), fuse=False))
    assert len(run.launches) > 5
    assert not run.parallel_regions


def test_little_work_wakes_nobody():
    few, more = (runs(plan_of(each, *vectors(*range(1000, 1000 + count))))[0] for count in (5, 20))
    work = [sum(work_in(launch.kernel.body) for launch in run.launches) for run in (few, more)]
    assert MACHINE.grain < work[0] < MACHINE.min_region_grains * MACHINE.grain < work[1]
    assert not few.parallel_regions
    assert more.parallel_regions


def test_one_long_kernel_and_crumbs_wake_nobody():
    assert not any(run.parallel_regions for run in runs(plan_of(each, *vectors(8000, 2, 3, 4, 5))))


def test_kernels_that_may_fail_keep_their_turn():
    def function(table: Tensor, where: Tensor, *tensors: Tensor) -> list[Tensor]:
        first, second = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        return [*each(*first), table[where].exp(), *each(*second)]

    table, where = torch.rand(500), torch.randint(0, 500, (333,))
    plan = plan_of(function, table, where, *vectors(*range(4000, 4020)))
    (run,) = runs(plan)
    (failing,) = [place for place, launch in enumerate(run.launches) if may_stop(launch.kernel)]
    assert failing == 10
    assert plan.regions == [0] * 10 + [None] + [1] * 10


def test_integers_are_divided_in_turn_where_the_divisor_may_be_zero():
    def divided(other: bool, *tensors: Tensor) -> list[Tensor]:
        return [torch.div(x, x if other else 3, rounding_mode="floor").sin().exp().tanh() for x in tensors]

    inputs = [torch.randint(1, 9, (size,)) for size in SIZES]
    (by_data,) = runs(plan_of(lambda *tensors: divided(True, *tensors), *inputs))
    (by_number,) = runs(plan_of(lambda *tensors: divided(False, *tensors), *inputs))
    assert not by_data.parallel_regions
    assert by_number.parallel_regions


def test_sizes_that_are_not_known_are_nothing_to_reckon_with():
    plan = plan_of(each, *vectors(*SIZES), dynamic=True)
    assert plan.launches
    assert not any(run.parallel_regions for run in runs(plan))


def test_bytes_that_are_used_twice_are_used_in_turn():
    """Where something lies is known after memory is planned: launches that keep different things at one place of the
    arena, or inside one tensor, are not independent."""
    plan = plan_of(each, *vectors(*SIZES))
    (run,) = runs(plan)
    regions = ParallelRegions(BufferTable(plan.program), MACHINE)
    results = [launch.arguments[0] for launch in run.launches]
    alone = replace(run, parallel_regions=())
    places = {name: place * 65536 for place, name in enumerate(results)}
    apart = replace(alone, offsets=places)
    assert [item.count for item in regions.shared(apart).parallel_regions] == [len(SIZES)]
    meeting = replace(alone, offsets=dict.fromkeys(places, 0))
    assert not regions.shared(meeting).parallel_regions
    in_one = replace(alone, borrowed_space={name: ("home", place) for name, place in places.items()})
    assert [item.count for item in regions.shared(in_one).parallel_regions] == [len(SIZES)]
    home, *guests = results
    in_each_other = replace(alone, borrowed_space=dict.fromkeys(guests, (home, 0)))
    assert not regions.shared(in_each_other).parallel_regions


def test_a_place_in_the_arena_that_ends_where_another_begins_is_free():
    plan = plan_of(each, *vectors(8192, 8176))
    (run,) = runs(plan)
    regions = ParallelRegions(BufferTable(plan.program), MACHINE)
    first, second = (launch.arguments[0] for launch in run.launches)
    for gap, count in ((0, 1), (-64, 0)):
        laid = replace(run, parallel_regions=(), offsets={first: 0, second: 4 * 8192 + gap})
        assert len(regions.shared(laid).parallel_regions) == count


@pytest.mark.parametrize(
    ("one", "other", "conflict"),
    [
        (Bytes("x", 0, 64, True), Bytes("x", 64, 128, True), False),
        (Bytes("x", 0, 65, True), Bytes("x", 64, 128, False), True),
        (Bytes("x", 0, 65, False), Bytes("x", 64, 128, True), True),
        (Bytes("x", 0, 65, False), Bytes("x", 64, 128, False), False),
        (Bytes("x", 0, float("inf"), True), Bytes("x", 640, 704, False), True),
    ],
)
def test_two_launches_conflict_where_bytes_meet_and_one_writes(one: Bytes, other: Bytes, conflict: bool):
    assert one.conflicts(other) == other.conflicts(one) == conflict
