"""A program while it is scheduled: one frozen value, which every step makes anew.

An item is what will run at its place. First that is an operation; operations become groups, groups become launches of
kernels, launches that follow each other become runs. What stands between (calls, bindings of sizes, sub-programs) stays
an operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ferrite.errors import Refusal
from ferrite.ir.program import Operation, Program
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.repeats import Repeat
from ferrite.schedule.steps import FusionRefusal, Launch, Plan, Run
from ferrite.schedule.target import Schedulings

MAX_NODES_SHOWN = 8  # named in the text of an item


@dataclass(frozen=True)
class ScheduleItem:
    """`refusal`: why a loop is not compiled. `bodies`: the plans of the sub-programs that an operation runs."""

    work: Operation | Group | Repeat | Launch | Run
    refusal: Refusal | None = None
    bodies: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        notes = [f"not compiled: {self.refusal}"] if self.refusal is not None else []
        notes += [f"{len(self.bodies)} bodies"] if self.bodies else []
        return "; ".join([text_of(self.work), *notes])


@dataclass(frozen=True)
class Schedule:
    """`in_place`: buffers that lie where another one lay before; in the program they are views of it from then on.
    `seen_elsewhere`: storages that others may look at though nothing in the program needs them any more."""

    program: Program
    schedulings: Schedulings
    items: tuple[ScheduleItem, ...] = ()
    not_fused: tuple[FusionRefusal, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    seen_elsewhere: frozenset[str] = frozenset()

    @cached_property
    def buffer_table(self) -> BufferTable:
        return BufferTable(self.program)

    def __str__(self) -> str:
        rows = [f"{number:3}  {item}" for number, item in enumerate(self.items)]
        rows += [f"     {new} lies where {old} lay" for new, old in self.in_place.items()]
        return "\n".join([f"schedule of {self.program.name}, {len(self.items)} items", *rows]) + "\n"


def text_of(work: Operation | Group | Repeat | Launch | Run) -> str:
    """One item in a line or a few: what it is, the graph's nodes in it, and the memory behind it.

    group over 128 x 1 rows: amax, sub, exp, sum_1, div
    launch amax_sub_exp_sum_1_div(buf3, arg0_1)
    """
    match work:
        case Group():
            rows = " x ".join(row.extent.text for row in work.rows) or "1"
            return f"group on {work.device} over {rows} rows: {nodes_of(work)}"
        case Repeat():
            return f"kernel ({', '.join(work.arguments)}) of {text_of(work.group)}"
        case Launch():
            return f"launch {work.name}({', '.join([*work.arguments, *(size.name for size in work.sizes)])})"
        case Run():
            return text_of_run(work)
    return f"{type(work).__name__.lower()} {', '.join(work.origin.nodes)}"


def nodes_of(group: Group) -> str:
    nodes = list(dict.fromkeys(node for operation in group.operations for node in operation.origin.nodes))
    more = f" and {len(nodes) - MAX_NODES_SHOWN} more" if len(nodes) > MAX_NODES_SHOWN else ""
    return ", ".join(nodes[:MAX_NODES_SHOWN]) + more


def text_of_run(run: Run) -> str:
    rows = [f"run of {len(run.launches)}" + (f", {run.arena} bytes of its own" if run.arena else "")]
    rows += [f"         {text_of(launch)}" for launch in run.launches]
    rows += [f"         {name} at byte {at}" for name, at in run.offsets.items()]
    rows += [f"         {name} in {tensor} at byte {at}" for name, (tensor, at) in run.borrowed_space.items()]
    rows += [f"         {each.first} to {each.first + each.count - 1} side by side" for each in run.parallel_regions]
    return "\n".join(rows)
