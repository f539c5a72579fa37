"""Memory of a plan: what is needed where, and what dies when."""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir.program import Operation, Program, reads, writes
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.steps import Run, Step


def private(program: Program, items: list[Group | Operation], buffer_table: BufferTable) -> dict[int, tuple[str, ...]]:
    """For each group, the storages that nothing else accesses and that do not leave the program."""
    users: dict[str, set[int]] = {}
    for place, item in enumerate(items):
        for operation in item.operations if isinstance(item, Group) else (item,):
            for access in (*reads(operation), *writes(operation)):
                users.setdefault(buffer_table.buffers[access.buffer].storage, set()).add(place)
    leaving = {buffer_table.buffers[name].storage for name in program.outputs if isinstance(name, str)}
    found: dict[int, list[str]] = {}
    for storage, places in users.items():
        if len(places) == 1 and storage not in leaving and buffer_table.buffers[storage].kind == "owned":
            found.setdefault(next(iter(places)), []).append(storage)
    return {place: tuple(names) for place, names in found.items()}


def accessed(step: Step) -> set[str]:
    """The buffers that a step needs to be there; of a launch, storages."""
    if isinstance(step, Run):
        return {name for launch in step.launches for name in launch.arguments}
    return {access.buffer for access in (*reads(step), *writes(step))}


def last_uses_of(program: Program, steps: Sequence[Step], buffer_table: BufferTable) -> tuple[tuple[str, ...], ...]:
    """For each step, the names that die with it: buffers, and the storages that they are views of."""
    leaving = {item for item in program.outputs if isinstance(item, str)}
    leaving |= {buffer_table.buffers[name].storage for name in leaving}
    last: dict[str, int] = {item: 0 for item in program.inputs if isinstance(item, str)}
    for place, step in enumerate(steps):
        for name in accessed(step):
            last[name] = place
            last[buffer_table.buffers[name].storage] = place
    last_uses: list[list[str]] = [[] for _ in steps]
    for name, place in last.items():
        if name not in leaving and buffer_table.buffers[name].kind != "constant" and steps:
            last_uses[place].append(name)
    return tuple(tuple(sorted(names)) for names in last_uses)
