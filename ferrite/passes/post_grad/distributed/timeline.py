"""When collectives begin and end beside what is computed: a forecast, and where to put them so that less is waited for.

Time is that of computing: `clock[p]` are the seconds until the p-th node begins if nothing is waited for. A collective
(`Job`) may begin from one place on and is needed at another. Collectives of one process group follow each other on one
channel; those of different groups do not hinder each other. All is arithmetic on what every rank knows.

    place      0     1     2     3     4
    computes   |--a--|--b--|--c--|--d--|        the second is needed at 3, takes as long as b, and begins before it
    channel    |==1==|     |==2==|
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Job:
    """A collective: where it may begin and is needed, where it begins and is waited for as things are, its seconds, and
    the bytes that it holds meanwhile. `is_early`: it begins as soon as it can, as what it is given can be freed then;
    others begin as late as they can be hidden, as what they give takes memory. `is_level`: it gives as much as it
    takes, so that nothing is gained by waiting before somebody needs it."""

    channel: int
    available: int
    needed: int
    start: int
    wait: int
    seconds: float
    size: int
    is_early: bool
    is_level: bool = False


@dataclass(frozen=True)
class Forecast:
    """`begin`, `end`: when each collective is on its channel. `exposed`: seconds that its wait takes. `total`: seconds
    until everything is done."""

    begin: tuple[float, ...]
    end: tuple[float, ...]
    exposed: tuple[float, ...]
    total: float

    @property
    def waiting(self) -> float:
        return sum(self.exposed)


def forecast(jobs: Sequence[Job], clock: Sequence[float]) -> Forecast:
    """What happens if every job begins at its `start`, and is waited for at its `wait`."""
    begin, end, exposed = ([0.0] * len(jobs) for _ in range(3))
    starts = sorted(range(len(jobs)), key=lambda each: (jobs[each].start, each))
    waits = sorted(range(len(jobs)), key=lambda each: (jobs[each].wait, each))
    free: dict[int, float] = {}
    delay, taken = 0.0, 0
    for each in waits:
        while taken < len(starts) and jobs[starts[taken]].start <= jobs[each].wait:
            job = jobs[starts[taken]]
            begin[starts[taken]] = max(clock[job.start] + delay, free.get(job.channel, 0.0))
            free[job.channel] = end[starts[taken]] = begin[starts[taken]] + job.seconds
            taken += 1
        exposed[each] = max(end[each] - clock[jobs[each].wait] - delay, 0.0)
        delay += exposed[each]
    return Forecast(tuple(begin), tuple(end), tuple(exposed), clock[-1] + delay)


@dataclass
class Limits:
    """How far collectives may be moved. `held`: bytes that the graph holds at each place as things are, `memory`: that
    it may hold; `in_flight`: bytes of collectives under way at one place; `prefetch`: of what `work` counts, that may
    lie between a collective and whoever needs it. `slack`: a part of its seconds."""

    held: list[float] = field(default_factory=list)
    memory: float = UNLIMITED
    in_flight: float = UNLIMITED
    prefetch: float = UNLIMITED
    work: Sequence[int] = ()
    slack: float = 0.0


class Placement:
    """Where each job begins and is waited for, one decision at a time."""

    def __init__(self, jobs: Sequence[Job], clock: Sequence[float], limits: Limits) -> None:
        self.jobs, self.clock, self.limits = list(jobs), clock, limits
        # What is asked of ranges of places is asked of tensors: there may be a thousand jobs, each over as many nodes.
        self.held = torch.tensor(limits.held or [0.0] * len(clock), dtype=torch.float64)
        self.flying = torch.zeros(len(clock), dtype=torch.float64)
        self.why: dict[int, str] = {}
        for job in jobs:
            self.flying[job.start : job.wait] += job.size

    def placed(self) -> list[Job]:
        for number, start in self.late_starts().items():
            self.begin_earlier(number, start)
        for number, job in enumerate(self.jobs):
            if job.is_early:
                self.begin_earlier(number, job.available)
        for number, wait in self.ends().items():
            self.wait_later(number, wait)
        return self.jobs

    def late_starts(self) -> dict[int, int]:
        """For what need not begin at once, the last place from which it is over when it is needed. Going back from the
        last one, each has its channel for itself; those that begin at once have it for as long as they take."""
        found: dict[int, int] = {}
        free: dict[int, float] = {}
        deadline = {number: self.deadline(job) for number, job in enumerate(self.jobs)}
        for number in sorted(deadline, key=lambda each: (-deadline[each], -each)):
            job = self.jobs[number]
            start = min(deadline[number], free.get(job.channel, UNLIMITED)) - job.seconds * (1 + self.limits.slack)
            free[job.channel] = start
            if not job.is_early:
                found[number] = max(bisect.bisect_right(self.clock, start) - 1, job.available)
        return dict(sorted(found.items(), key=lambda each: (self.jobs[each[0]].needed, each[0])))

    def deadline(self, job: Job) -> float:
        return self.clock[job.available] + job.seconds if job.is_early else self.clock[job.needed]

    def begin_earlier(self, number: int, wanted: int) -> None:
        job = self.jobs[number]
        if wanted >= job.start:
            if not job.is_early and job.start > job.available:
                self.jobs[number] = replace(job, start=min(wanted, job.wait))
            return
        work = self.limits.work
        if work:
            first = bisect.bisect_left(work, work[job.needed] - self.limits.prefetch)
            if first > wanted:
                self.why[number] = "it would begin further ahead than prefetch allows"
                wanted = min(first, job.start)
        full = self.without_room(number, wanted, job.start)
        place = wanted if not len(full) else wanted + int(full[-1]) + 1
        self.take(place, job.start, job.size)
        self.jobs[number] = replace(job, start=place)

    def ends(self) -> dict[int, int]:
        """The last place at which each is waited for: where it should be over, or where it is needed."""
        found: dict[int, int] = {}
        free: dict[int, float] = {}
        pending: list[tuple[int, float]] = []  # waits that take time, by place
        delay = 0.0
        for number in sorted(range(len(self.jobs)), key=lambda each: (self.jobs[each].start, each)):
            job = self.jobs[number]
            while pending and pending[0][0] <= job.start:
                place, end = heapq.heappop(pending)
                delay += max(end - self.clock[place] - delay, 0.0)
            end = max(self.clock[job.start] + delay, free.get(job.channel, 0.0)) + job.seconds
            free[job.channel] = end
            done = bisect.bisect_left(self.clock, end - delay + job.seconds * self.limits.slack)
            # In truth it may be over later than forecast: what is computed takes time from what is sent.
            found[number] = job.needed if job.is_level else min(max(done, job.wait), job.needed)
            heapq.heappush(pending, (found[number], end))
        return found

    def wait_later(self, number: int, wanted: int) -> None:
        job = self.jobs[number]
        full = self.without_room(number, job.wait, wanted)
        place = wanted if not len(full) else job.wait + int(full[0])
        self.take(job.wait, place, job.size)
        self.jobs[number] = replace(job, wait=place)

    def without_room(self, number: int, first: int, last: int) -> torch.Tensor:
        """The places of a range, counted from its first, at which there is no room for a job; and a note why."""
        size = self.jobs[number].size
        flies = self.flying[first:last] + size > self.limits.in_flight
        holds = self.held[first:last] + size > self.limits.memory
        if bool(flies.any()):
            self.why.setdefault(number, "more would be in flight than in_flight_mb allows")
        elif bool(holds.any()):
            self.why.setdefault(number, "more memory would be held than memory_mb and memory_percent allow")
        return (flies | holds).nonzero().flatten()

    def take(self, first: int, last: int, size: int) -> None:
        self.held[first:last] += size
        self.flying[first:last] += size


def hidden(found: Forecast, jobs: Sequence[Job]) -> float:
    """The part of communication that nobody waits for."""
    total = sum(job.seconds for job in jobs)
    return 1.0 if total == 0 else max(0.0, 1 - found.waiting / total)
