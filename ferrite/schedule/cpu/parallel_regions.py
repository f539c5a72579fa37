"""Kernels of a run that share one parallel region: its threads take one after the other, and run each alone.

A kernel that is too small to share its loop leaves all threads but one idle; many of them side by side do not, where
none needs what another writes. That is decided by bytes, after memory is planned: what lies in one place at different
times must not be there at once. Kernels that may stop keep their turn, since the first failure in the order of the
program is the one to report. A kernel that is large beside the others keeps a region of its own: sharing its loop is
the better balance.

Kernels may run before large ones that stood between them, if they need nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ferrite.ir.kernel import Accumulate, Loop, Statement, When, may_stop, walk
from ferrite.machines import Machine
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.loops.axes import Body, work_of
from ferrite.schedule.memory.arena import bytes_of
from ferrite.schedule.steps import Launch, ParallelRegion, Run

ARENA = ""  # no storage has this name


@dataclass(frozen=True)
class Bytes:
    """Bytes of a tensor or of the arena that a launch reads or writes."""

    where: str
    low: float
    high: float
    written: bool

    def conflicts(self, other: Bytes) -> bool:
        apart = self.high <= other.low or other.high <= self.low
        return (self.written or other.written) and not apart


@dataclass
class Cluster:
    """Launches that may run at once, by their places, and those that follow them, in order."""

    at_once: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    accessed: dict[str, list[Bytes]] = field(default_factory=dict)

    def takes(self, needs: Sequence[Bytes]) -> bool:
        """Whether a launch needs nothing that those here write, and writes nothing that they need."""
        return not any(one.conflicts(other) for one in needs for other in self.accessed.get(one.where, ()))

    def add(self, launch: int, needs: Sequence[Bytes], at_once: bool) -> None:
        (self.at_once if at_once else self.after).append(launch)
        for each in needs:
            self.accessed.setdefault(each.where, []).append(each)


class ParallelRegions:
    def __init__(self, buffer_table: BufferTable, machine: Machine) -> None:
        self.buffer_table, self.machine = buffer_table, machine
        self.work_by_body: dict[int, float] = {}  # by the body, which kernels that repeat have in common

    def shared(self, run: Run) -> Run:
        """The run with launches together where that pays, each region with its longest first."""
        if len(run.launches) < 2:
            return run
        order: list[int] = []
        parallel_regions: list[ParallelRegion] = []
        for cluster in self.clusters(run):
            places = self.balanced(cluster.at_once, run)
            threads = self.threads_for([self.work(run.launches[place]) for place in places])
            if threads < 2:
                order += sorted(cluster.at_once + cluster.after)
                continue
            parallel_regions.append(ParallelRegion(len(order), len(places), threads))
            order += places
            order += sorted({*cluster.at_once, *cluster.after}.difference(places))
        if not parallel_regions:
            return run
        return replace(
            run, launches=tuple(run.launches[place] for place in order), parallel_regions=tuple(parallel_regions)
        )

    def clusters(self, run: Run) -> list[Cluster]:
        found = [Cluster()]
        for place, launch in enumerate(run.launches):
            needs = self.needs(launch, run)
            if self.work(launch) == math.inf:  # nothing moves past it
                found += [Cluster(after=[place]), Cluster()]
                continue
            at_once = found[-1].takes(needs)
            if not at_once and self.is_small(launch):
                found.append(Cluster())
                at_once = True
            found[-1].add(place, needs, at_once)
        return found

    def needs(self, launch: Launch, run: Run) -> list[Bytes]:
        found = []
        for pointer, name in zip(launch.kernel.pointers, launch.arguments, strict=True):
            where, low, size = name, 0, None
            if name in run.offsets:
                where, low, size = ARENA, run.offsets[name], bytes_of(name, self.buffer_table, self.machine.line_bytes)
            elif name in run.borrowed_space:
                (where, low), size = (
                    run.borrowed_space[name],
                    bytes_of(name, self.buffer_table, self.machine.line_bytes),
                )
            high = math.inf if size is None else low + size
            found.append(Bytes(where, low if size is not None else 0, high, pointer.access != "read"))
        return found

    # --- what is worth it ---------------------------------------------------------------------------------------------

    def work(self, launch: Launch) -> float:
        """In additions; without end where that is not known, or the kernel may stop."""
        kernel = launch.kernel
        if id(kernel.body) not in self.work_by_body:
            self.work_by_body[id(kernel.body)] = math.inf if kernel.sizes or may_stop(kernel) else work_in(kernel.body)
        return self.work_by_body[id(kernel.body)]

    def is_small(self, launch: Launch) -> bool:
        """Whether one thread should run it: it has little to do, or no loop that threads could share."""
        if self.work(launch) <= self.machine.small_kernel_grains * self.machine.grain:
            return True
        return not any(isinstance(item, Loop) and item.kind == "parallel" for item in walk(launch.kernel.body))

    def balanced(self, places: Sequence[int], run: Run) -> list[int]:
        """The longest first, without those that the others would wait for."""
        work = {place: self.work(run.launches[place]) for place in places}
        left = sorted(places, key=lambda place: (-work[place], place))
        total = sum(work.values())
        spread = self.machine.region_spread
        while left and work[left[0]] * spread > total and not self.is_small(run.launches[left[0]]):
            total -= work[left.pop(0)]
        return left

    def threads_for(self, work: Sequence[float]) -> int:
        """One runs the longest kernel; each of the others needs as much to do as where threads share a loop."""
        total = sum(work)
        if total < self.machine.min_region_grains * self.machine.grain:
            return 1
        return min(1 + int((total - max(work)) // self.machine.grain), len(work))


def work_in(body: Body) -> float:
    """Work of all rounds of all loops, as far as extents are known."""
    here: list[Statement] = []
    total: float = 0
    for statement in body:
        if isinstance(statement, Loop | Accumulate | When):
            total += rounds(statement) * work_in(statement.body)
        else:
            here.append(statement)
    return total + work_of(tuple(here))


def rounds(statement: Statement) -> float:
    if not isinstance(statement, Loop):
        return 1
    high = statement.axis.extent.high
    return math.inf if high is None else high
