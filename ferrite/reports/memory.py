"""Memory over the launches and calls of a plan: what holds how much, from where to where."""

from __future__ import annotations

from collections.abc import Mapping

from ferrite.debug import PeakMemory
from ferrite.errors import NotScheduled
from ferrite.ir.program import Operation, writes
from ferrite.reports.data import Held, Memory
from ferrite.reports.sources import SourceLines
from ferrite.reports.texts import title_of
from ferrite.schedule import BufferTable, Plan, Run, accessed, bytes_at

ARENA = "arena"


def memory_data(plan: Plan, known: PeakMemory | None, hints: Mapping[str, int], places: SourceLines) -> Memory:
    peak, eager = (None, None) if known is None else (known.peak, known.eager)
    titles = [title for step in plan.steps for title in step_titles(step)]
    try:
        held = Holders(plan, hints, places).all()
    except NotScheduled:
        return Memory(peak, eager)
    changes = [0] * (len(titles) + 2)
    for each in held:
        if not each.within:
            changes[each.first] += each.bytes
            changes[each.last + 1] -= each.bytes
    by_step, total = [], 0
    for change in changes[:-1]:
        total += change
        by_step.append(total)
    return Memory(peak, eager, tuple(by_step), (*titles, "results"), tuple(held))


class Holders:
    """As `ferrite.schedule.memory.peak` counts bytes, by name. What is given away to the program counts against it from
    where it is freed. A run has its memory from its first launch to its last."""

    def __init__(self, plan: Plan, hints: Mapping[str, int], places: SourceLines) -> None:
        self.plan, self.hints, self.places = plan, hints, places
        self.table = BufferTable(plan.program)
        self.origins = {
            self.table.buffers[access.buffer].storage: operation.origin
            for operation in reversed(plan.program.operations)
            for access in writes(operation)
        }
        self.alive: dict[str, tuple[int, int]] = {}
        self.found: list[Held] = []

    def all(self) -> list[Held]:
        at = 0
        end = sum(len(step_titles(step)) for step in self.plan.steps)
        for place, step in enumerate(self.plan.steps):
            last = at + len(step_titles(step)) - 1
            for name in sorted(accessed(step)):
                if not isinstance(step, Run) or not step.is_inside(name):
                    self.make(name, at)
            if isinstance(step, Run):
                self.inside(step, at, last)
            for name in self.plan.last_uses[place]:
                if self.table.buffers[name].kind == "donated":
                    size = bytes_at(self.table.buffers[name], self.hints)
                    self.found.append(Held(name, "given away", -size, last + 1, end, -1))
                elif name in self.alive:
                    self.add(name, *self.alive.pop(name), last)
            at = last + 1
        for item in self.plan.program.outputs:
            if isinstance(item, str):
                self.make(item, end)
        for name, (first, size) in self.alive.items():
            self.add(name, first, size, end)
        return [each for each in self.found if each.bytes and each.first <= each.last]

    def make(self, name: str, at: int) -> None:
        buffer = self.table.buffers[self.table.buffers[name].storage]
        if buffer.kind == "owned" and buffer.name not in self.alive:
            self.alive[buffer.name] = (at, bytes_at(buffer, self.hints))

    def inside(self, run: Run, first: int, last: int) -> None:
        """What lies in the arena of a run, and in tensors that have room."""
        if run.arena:
            self.found.append(Held(ARENA, f"of {len(run.launches)} kernels", run.arena, first, last, -1))
        within = dict.fromkeys(run.offsets, ARENA) | {name: tensor for name, (tensor, _) in run.borrowed_space.items()}
        for name, around in within.items():
            used = [place for place, launch in enumerate(run.launches) if name in launch.arguments]
            if used:
                size = bytes_at(self.table.buffers[name], self.hints)
                self.add(name, first + used[0], size, first + used[-1], around)

    def add(self, name: str, first: int, size: int, last: int, within: str = "") -> None:
        origin = self.origins.get(name)
        what, place = ("", -1) if origin is None else (", ".join(origin.nodes), self.places.of(origin.line))
        self.found.append(Held(name, what, size, first, last, place, within))


def step_titles(step: Run | Operation) -> list[str]:
    """What each launch of a run is called, or a call."""
    if isinstance(step, Run):
        return [launch.name for launch in step.launches]
    return [f"{title_of(step)} {', '.join(step.origin.nodes[:2])}".strip()]
