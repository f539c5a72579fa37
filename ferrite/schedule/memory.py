"""Memory of a plan: what is needed where, what dies when, and one block for what a run of kernels needs alone."""

from __future__ import annotations

from ferrite.ir.index import Number
from ferrite.ir.program import Operation, Program
from ferrite.ir.questions import reads, writes
from ferrite.schedule.groups import Group
from ferrite.schedule.steps import Run, Step
from ferrite.schedule.touches import Layouts

ALIGNED = 64  # bytes: a line of the cache


def private(program: Program, items: list[Group | Operation], layouts: Layouts) -> dict[int, tuple[str, ...]]:
    """For each group, the storages that nothing else touches and that do not leave the program."""
    users: dict[str, set[int]] = {}
    for place, item in enumerate(items):
        for operation in item.operations if isinstance(item, Group) else (item,):
            for access in (*reads(operation), *writes(operation)):
                users.setdefault(layouts.buffers[access.buffer].storage, set()).add(place)
    leaving = {layouts.buffers[name].storage for name in program.outputs if isinstance(name, str)}
    found: dict[int, list[str]] = {}
    for storage, places in users.items():
        if len(places) == 1 and storage not in leaving and layouts.buffers[storage].kind == "owned":
            found.setdefault(next(iter(places)), []).append(storage)
    return {place: tuple(names) for place, names in found.items()}


def touched(step: Step, layouts: Layouts) -> set[str]:
    """The buffers that a step needs to be there; of a launch, storages."""
    if isinstance(step, Run):
        return {name for launch in step.launches for name in launch.arguments}
    return {access.buffer for access in (*reads(step), *writes(step))}


def last_uses(program: Program, steps: list[Step], layouts: Layouts) -> tuple[tuple[str, ...], ...]:
    """For each step, the names that die with it: buffers, and the storages that they are views of."""
    leaving = {item for item in program.outputs if isinstance(item, str)}
    leaving |= {layouts.buffers[name].storage for name in leaving}
    last: dict[str, int] = {item: 0 for item in program.inputs if isinstance(item, str)}
    for place, step in enumerate(steps):
        for name in touched(step, layouts):
            last[name] = place
            last[layouts.buffers[name].storage] = place
    dying: list[list[str]] = [[] for _ in steps]
    for name, place in last.items():
        if name not in leaving and layouts.buffers[name].kind != "constant" and steps:
            dying[place].append(name)
    return tuple(tuple(sorted(names)) for names in dying)


def private_to_runs(program: Program, steps: list[Step], layouts: Layouts) -> list[set[str]]:
    """For each step, the storages that it alone touches and that do not leave the program."""
    leaving = {layouts.buffers[item].storage for item in program.outputs if isinstance(item, str)}
    users: dict[str, set[int]] = {}
    for place, step in enumerate(steps):
        for name in touched(step, layouts):
            users.setdefault(layouts.buffers[name].storage, set()).add(place)
    found: list[set[str]] = [set() for _ in steps]
    for storage, places in users.items():
        if len(places) == 1 and storage not in leaving:
            found[next(iter(places))].add(storage)
    return found


def with_arena(run: Run, own: set[str], layouts: Layouts) -> Run:
    """What only this run touches lies in one block of memory, at places that are free while it is needed."""
    spans: dict[str, tuple[int, int]] = {}
    for place, launch in enumerate(run.launches):
        for name in launch.arguments:
            spans[name] = (spans.get(name, (place, place))[0], place)
    sizes = {
        name: size
        for name in spans
        if name in own and layouts.buffers[name].kind == "owned" and (size := bytes_of(name, layouts)) is not None
    }
    offsets: dict[str, int] = {}
    total = 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the large ones first, where they fit
        first, last = spans[name]
        busy = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if spans[other][0] <= last and first <= spans[other][1]
        )
        place = 0
        for low, high in busy:
            if place + sizes[name] <= low:
                break
            place = max(place, high)
        offsets[name] = place
        total = max(total, place + sizes[name])
    return Run(run.launches, total, offsets)


def bytes_of(name: str, layouts: Layouts) -> int | None:
    """Bytes that a buffer needs, in whole lines; None where that is not known before it runs."""
    buffer = layouts.buffers[name]
    reach = 1
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        if not isinstance(size, Number) or not isinstance(stride, Number):
            return None
        if size.value == 0:
            return ALIGNED
        reach += (size.value - 1) * stride.value
    needed = reach * buffer.dtype.itemsize
    return -(-needed // ALIGNED) * ALIGNED
