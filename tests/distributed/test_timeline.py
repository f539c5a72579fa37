"""Where collectives begin and are waited for: arithmetic on a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ferrite
from ferrite.passes.post_grad.distributed.timeline import Job, Limits, Placement, forecast
from tests.compare import compile_strict, reset
from tests.distributed.programs import gathered
from tests.ranks import imagined_ranks

CLOCK = [float(place) for place in range(11)]  # ten nodes of a second each


def gather(needed: int, seconds: float = 1.0, channel: int = 0, available: int = 0, size: int = 10) -> Job:
    return Job(channel, available, needed, needed, needed, seconds, size, is_early=False)


def scatter(available: int, seconds: float = 1.0, needed: int = 10, size: int = 10) -> Job:
    return Job(0, available, needed, available, available, seconds, size, is_early=True)


def placed(*jobs: Job, **limits: Any) -> list[Job]:
    return Placement(jobs, CLOCK, Limits(**limits)).placed()


def test_what_is_waited_for_where_it_begins_is_exposed():
    found = forecast([gather(3, 2.0), gather(5)], CLOCK)
    assert found.exposed == (2.0, 1.0)
    assert found.total == 13.0
    assert found.begin == (3.0, 7.0)  # what came before has taken two seconds more


def test_collectives_of_one_group_follow_each_other_and_others_do_not():
    first, second = (replace(gather(4, 3.0, channel=each), start=1) for each in (0, 0))
    assert forecast([first, second], CLOCK).end == (4.0, 7.0)
    assert forecast([first, replace(second, channel=1)], CLOCK).end == (4.0, 4.0)


def test_a_gather_begins_as_late_as_it_is_hidden():
    (job,) = placed(gather(6, 2.0))
    assert (job.start, job.wait) == (4, 6)
    assert forecast([job], CLOCK).waiting == 0


def test_gathers_make_room_for_each_other():
    jobs = placed(gather(6, 2.0), gather(7, 3.0))
    assert [job.start for job in jobs] == [2, 4]
    assert forecast(jobs, CLOCK).waiting == 0


def test_slack_lets_a_gather_begin_earlier():
    (job,) = placed(gather(8, 2.0), slack=1.0)
    assert job.start == 4


def test_a_gather_begins_no_earlier_than_it_can():
    (job,) = placed(gather(6, 4.0, available=5))
    assert (job.start, job.wait) == (5, 6)
    assert forecast([job], CLOCK).waiting == 3.0


def test_a_scatter_begins_at_once_and_is_waited_for_when_it_is_over():
    (job,) = placed(scatter(3, 2.0))
    assert (job.start, job.wait) == (3, 5)


def test_what_gives_as_much_as_it_takes_is_waited_for_where_it_is_needed():
    only = replace(scatter(available=2, needed=8), is_level=True)
    (found,) = placed(only)
    assert (found.start, found.wait) == (2, 8)


def test_scatters_wait_for_those_before_them():
    jobs = placed(scatter(2, 3.0), scatter(3, 3.0))
    assert [job.wait for job in jobs] == [5, 8]
    assert forecast(jobs, CLOCK).waiting == 0


def test_nothing_moves_where_nothing_may_be_in_flight():
    jobs = [gather(6, 2.0), scatter(3, 2.0)]
    placement = Placement(jobs, CLOCK, Limits(in_flight=0))
    assert placement.placed() == jobs
    assert "in_flight_mb" in placement.why[0]


def test_memory_bounds_how_early_a_gather_begins():
    held = [5.0] * 5 + [0.0] * 6
    placement = Placement([gather(8, 5.0)], CLOCK, Limits(held=held, memory=12.0))
    (job,) = placement.placed()
    assert job.start == 5  # before, ten bytes more would be fifteen
    assert "memory" in placement.why[0]
    assert placed(gather(8, 5.0), held=held, memory=15.0)[0].start == 3


def test_prefetch_counts_what_is_computed():
    work = list(range(11))
    placement = Placement([gather(8, 5.0)], CLOCK, Limits(work=work, prefetch=2))
    assert placement.placed()[0].start == 6
    assert "prefetch" in placement.why[0]


@pytest.mark.parametrize("world", [8, 1024])
def test_a_step_is_seen_on_paper(world):
    """As one rank among so many would send it, though no other is there."""

    def fn(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = torch.relu(x @ gathered(shard, ranks=world))
        return x

    reset()
    with imagined_ranks(world), torch.no_grad():
        compile_strict(fn)(torch.randn(64, world), *(torch.randn(1, world) for _ in range(3)))
        found = ferrite.last_compile().communication
    ((kind, record),) = found.graphs
    assert {each.ranks for each in record.collectives} == {world}
    assert {each.between_machines for each in record.collectives} == {world > 8}
    assert sum(found.bytes_per_group.values()) == 3 * world * world * 4
    assert 0 < record.exposed < record.captured.exposed
    assert kind in found.timeline()
