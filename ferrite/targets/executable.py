"""From a plan, which may have kernels on several devices, to code; and from code to functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ferrite.codegen import Executable, Recording, print_host
from ferrite.errors import Refusal, RefusedKernels
from ferrite.ir import Axis
from ferrite.ir.kernel import checks
from ferrite.ir.program import Operation, Program, call_of, writes
from ferrite.pipeline import Fuel
from ferrite.runtime import KernelStore, StepTimes, labels_of
from ferrite.runtime.cuda import Recorder
from ferrite.schedule import (
    BufferTable,
    BuiltKernel,
    Group,
    Member,
    Plan,
    Postponing,
    Run,
    RunMemory,
    Scheduling,
    device_type,
)
from ferrite.targets.choose import Targets
from ferrite.targets.cuda import CudaTarget
from ferrite.targets.target import LoadedRun


class UncompiledOperations(Exception):
    """No kernels can be made of these operations, as they were arranged: why, by what they write."""

    def __init__(self, reasons: Mapping[frozenset[str], Refusal]) -> None:
        super().__init__("; ".join(refusal.reason for refusal in reasons.values()))
        self.reasons = reasons


@dataclass(frozen=True)
class Refusing:
    """A scheduling that knows of operations that could not be compiled as they were arranged. What was part of a larger
    kernel is tried alone, what was alone is refused."""

    scheduling: Scheduling
    failed: Mapping[frozenset[str], list[Refusal]]

    def refuses(self, operation: Operation) -> Refusal | None:
        reasons = self.failed.get(written_by(operation), ())
        return self.scheduling.refuses(operation) or (reasons[-1] if len(reasons) > 1 else None)

    def prepared(self, program: Program) -> Program:
        return self.scheduling.prepared(program)

    def slower(self, group: Group, member: Member, rows: tuple[Axis, ...]) -> Refusal | None:
        if self.failed:
            for operation in (member.operation, *group.operations):
                if reasons := self.failed.get(written_by(operation)):
                    return reasons[0]
        return self.scheduling.slower(group, member, rows)

    def alike(self, group: Group, buffer_table: BufferTable) -> Hashable:
        return self.scheduling.alike(group, buffer_table)

    def arranged(self, group: Group, inside: Iterable[str], buffer_table: BufferTable) -> BuiltKernel:
        return self.scheduling.arranged(group, inside, buffer_table)

    def grouped(self, run: Run, buffer_table: BufferTable, leaving: Collection[str], fuel: Fuel) -> Run:
        return run if self.failed else self.scheduling.grouped(run, buffer_table, leaving, fuel)

    def finished(self, run: Run, buffer_table: BufferTable) -> Run:
        return self.scheduling.finished(run, buffer_table)

    @property
    def run_memory(self) -> RunMemory:
        return self.scheduling.run_memory

    @property
    def postponing(self) -> Postponing | None:
        return None if self.failed else self.scheduling.postponing


def written_by(operation: Operation) -> frozenset[str]:
    return frozenset(access.buffer for access in writes(operation))


class Stores(Protocol):
    def __call__(self, identity: str) -> KernelStore | None:
        """Where kernels for one kind of machine are kept."""


def executable_of(
    plan: Plan,
    targets: Targets,
    stores: Stores = lambda identity: None,
    checked: bool = False,
    recording: Recording | None = None,
) -> Executable:
    """`checked`: kernels compare every address with the bounds of its memory. `recording`: parts of the host program
    are to be recorded. Raises UncompiledOperations."""
    pairs = plan.kernels
    numbers = {pair: number for number, pair in enumerate(pairs)}
    spellings = {device: target.spelling for device, target in targets.items()}
    source = print_host(plan, numbers, spellings, checked, recording)
    names: dict[int, str] = {}
    code: dict[str, bytes] = {}
    for device in dict.fromkeys(device for device, _kernel in pairs):
        kernels = [kernel for where, kernel in pairs if where == device]
        target = targets[device_type(device)]
        try:
            made, more = target.compiled(kernels, stores(target.identity()), checked)
        except RefusedKernels as refusal:
            raise UncompiledOperations(
                {
                    written_by(operation): reason
                    for place, reason in refusal.reasons.items()
                    for launch in plan.launches
                    if launch.device == device and launch.kernel == kernels[place]
                    for operation in launch.operations
                }
            ) from None
        names |= {numbers[device, kernel]: name for kernel, name in zip(kernels, made, strict=True)}
        code |= more
    complaints = [tuple(check.complaint for check in checks(kernel)) for _device, kernel in pairs]
    return Executable(source, tuple((names[number], complaints[number]) for number in range(len(pairs))), code)


def kernel_sources(plan: Plan, targets: Targets, checked: bool = False) -> dict[str, str]:
    """What the kernels of a plan are compiled from, as files: `kernel_0.ll`."""
    found: dict[str, str] = {}
    for number, (device, kernel) in enumerate(plan.kernels):
        suffix, text = targets[device_type(device)].source(kernel, checked)
        found[f"kernel_{number}{suffix}"] = text
    return found


def runs_of(executable: Executable, targets: Targets) -> list[LoadedRun]:
    """What runs each table of a host program."""
    tables = executable.source.runs
    loaded: dict[int, LoadedRun] = {}
    for device in dict.fromkeys(table.device for table in tables):
        places = [place for place, table in enumerate(tables) if table.device == device]
        used = {executable.kernels[call.kernel][0] for place in places for call in tables[place].calls}
        code = code_for(used, executable, len(places) == len(tables))
        runs = targets[device_type(device)].loaded(executable.kernels, code, [tables[place] for place in places])
        loaded |= dict(zip(places, runs, strict=True))
    return [loaded[place] for place in range(len(tables))]


def timed_runs_of(executable: Executable, targets: Targets, times: StepTimes) -> list[LoadedRun]:
    """The same, cut into launches, each of which is measured."""
    tables = executable.source.runs
    parts = [
        replace(table, calls=(call,), parallel_regions=(), arena_parts=()) for table in tables for call in table.calls
    ]
    loaded = iter(runs_of(replace(executable, source=replace(executable.source, runs=parts)), targets))
    return [times.run(number, [next(loaded) for _ in table.calls], table.device) for number, table in enumerate(tables)]


def ranges_of(
    executable: Executable, targets: Targets, runs: Sequence[LoadedRun], about: Callable[[], list[tuple[str, str]]]
) -> Callable[[], Mapping[str, LoadedRun]]:
    """The runs of a host program for profilers, made when one looks. `about`: names of kernels and lines of the model,
    those of sub-programs last, where host programs have them first. The code of the kernels is not held."""
    kernels, tables, in_order = (
        executable.kernels,
        tuple(executable.source.runs),
        "_body_" not in executable.source.text,
    )

    def made() -> Mapping[str, LoadedRun]:
        labels = labels_of(tables, about(), in_order)
        return {
            f"run_{number}": targets[device_type(table.device)].named(kernels, table, labels[number], runs[number])
            for number, table in enumerate(tables)
        }

    return made


def steps_for_eager(plan: Plan, targets: Targets) -> dict[str, str]:
    """Nodes of the graph that a GPU has no kernels for, though they have loops, and why. Eager has a kernel for each;
    a program of loops, interpreted on a GPU, would start one for every operation in it."""
    table = BufferTable(plan.program)
    found: dict[str, str] = {}
    for place, refusal in plan.not_compiled.items():
        step = plan.steps[place]
        if not isinstance(step, Run) and call_of(step) is None:
            written = [table.buffers[access.buffer].device.type for access in writes(step)]
            if any(isinstance(targets.get(device), CudaTarget) for device in written):
                found |= dict.fromkeys(step.origin.nodes, refusal.reason)
    return found


def recording_for(targets: Targets, kept: Collection[int] = (), lends_gradients: bool = False) -> Recording | None:
    """What can be recorded on the devices of a graph; None where nothing can. `kept`: places of results that only the
    backward program sees. `lends_gradients`: the graph is a backward one, whose results may stay in its recordings."""
    devices = frozenset(device for device, target in targets.items() if isinstance(target, CudaTarget))
    return Recording(devices, frozenset(kept), lends_gradients) if devices else None


def recorders_of(executable: Executable, targets: Targets) -> list[Recorder]:
    """What records and replays each part of a host program."""
    made = []
    for part in executable.source.parts:
        target = targets[device_type(part.device)]
        assert isinstance(target, CudaTarget)
        made.append(target.recorder(part))
    return made


def code_for(used: set[str], executable: Executable, all_of_it: bool) -> Mapping[str, bytes]:
    """The code that one device needs: its kernels, and what is no kernel."""
    if all_of_it:
        return executable.code
    others = {name for name, _complaints in executable.kernels} - used
    return {name: code for name, code in executable.code.items() if name not in others}
