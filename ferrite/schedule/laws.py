"""The laws of a schedule, checked after every step in tests; one that breaks a law is a bug of the step.

S1  every loop of the program is in one item
S2  a launch has an argument for each pointer of its kernel, and each is a storage of the program
S3  what lies in the memory of a run lies inside of it
S4  two storages that a run needs at once do not lie at the same bytes
S5  launches side by side are launches of their run, each in one region at most
S6  what one problem of a grouped kernel writes, no other reads or writes
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from ferrite.ir import InvalidProgram
from ferrite.ir.program import Attention, Compute, LoopOperation, Reduce, Scan, Sort
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.repeats import Repeat
from ferrite.schedule.memory.arena import bytes_of, meet, spans_of
from ferrite.schedule.schedule import Schedule
from ferrite.schedule.steps import Launch, Run, device_type

LOOPS = (Compute, Reduce, Scan, Sort, Attention)


def verify_schedule(schedule: Schedule) -> Schedule:
    """The schedule itself, if it keeps every law."""
    check_loops(schedule)
    for item in schedule.items:
        for launch in launches_in(item.work):
            check_launch(launch, schedule)
        if isinstance(item.work, Run):
            check_run(item.work, schedule)
    return schedule


def check_loops(schedule: Schedule) -> None:
    wanted = Counter(each.origin for each in schedule.program.operations if isinstance(each, LOOPS))
    found = Counter(loop.origin for item in schedule.items for loop in loops_in(item.work))
    if wanted != found:
        lost = next(iter((wanted - found) or (found - wanted)))
        raise InvalidProgram(
            "S1", f"{', '.join(lost.nodes)} is in {found[lost]} items and {wanted[lost]} times in the program"
        )


def loops_in(work: object) -> Iterator[LoopOperation]:
    match work:
        case Group():
            yield from work.operations
        case Repeat():
            yield from work.group.operations
        case Launch() | Run():
            for launch in launches_in(work):
                yield from launch.operations
        case Compute() | Reduce() | Scan() | Sort() | Attention():
            yield work


def launches_in(work: object) -> tuple[Launch, ...]:
    return work.launches if isinstance(work, Run) else (work,) if isinstance(work, Launch) else ()


def check_launch(launch: Launch, schedule: Schedule) -> None:
    if len(launch.arguments) != len(launch.kernel.arguments):
        raise InvalidProgram("S2", f"{launch.name} has {len(launch.arguments)} arguments for other pointers")
    for name in launch.arguments:
        buffer = schedule.buffer_table.buffers.get(name)
        if buffer is None or buffer.storage != name:
            raise InvalidProgram("S2", f"{launch.name} is given {name}, which is no storage")
    check_problems(launch)


def check_problems(launch: Launch) -> None:
    width = len(launch.kernel.pointers)
    users: dict[str, set[int]] = {}
    for place, name in enumerate(launch.arguments):
        users.setdefault(name, set()).add(place // width)
    for place, name in enumerate(launch.arguments):
        if launch.kernel.pointers[place % width].access != "read" and len(users[name]) > 1:
            raise InvalidProgram("S6", f"{launch.name} writes {name} in one problem, and needs it in another")


def check_run(run: Run, schedule: Schedule) -> None:
    spans = spans_of(run)
    alignment = schedule.schedulings[device_type(run.launches[0].device)].run_memory.alignment
    places: dict[str, list[tuple[str, int, int]]] = {}
    for name, at in run.offsets.items():
        size = bytes_of(name, schedule.buffer_table, alignment)
        if size is None or at + size > run.arena:
            raise InvalidProgram("S3", f"{name} does not lie inside of the {run.arena} bytes of its run")
        places.setdefault("", []).append((name, at, at + size))
    for name, (tensor, at) in run.borrowed_space.items():
        places.setdefault(tensor, []).append((name, at, at + (bytes_of(name, schedule.buffer_table, alignment) or 1)))
    for some in places.values():
        for (one, low, high), (other, other_low, other_high) in itertools.combinations(some, 2):
            if low < other_high and other_low < high and meet(spans[one], spans[other]):
                raise InvalidProgram("S4", f"{one} and {other} lie at the same bytes at the same time")
    end = 0
    for each in run.parallel_regions:
        if each.first < end or each.first + each.count > len(run.launches):
            raise InvalidProgram("S5", f"a region of launches {each.first} to {each.first + each.count - 1}")
        end = each.first + each.count
