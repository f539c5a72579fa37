"""A GPU's part in scheduling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

from ferrite.errors import Refusal
from ferrite.ir import Axis
from ferrite.ir.program import Operation, Program, Scan
from ferrite.machines import GpuMachine
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.gpu import attention
from ferrite.schedule.gpu.grouping import Grouping
from ferrite.schedule.gpu.horizontal import alike
from ferrite.schedule.gpu.kernels import build
from ferrite.schedule.gpu.prepare import prepare
from ferrite.schedule.gpu.products import Tuned
from ferrite.schedule.gpu.profit import slower
from ferrite.schedule.gpu.scatter import refused
from ferrite.schedule.loops.scans import has_state
from ferrite.schedule.steps import Run
from ferrite.schedule.target import BuiltKernel, Postponing, RunMemory


@dataclass(frozen=True)
class GpuScheduling:
    """`unsupported`: why the code generator cannot make a kernel of an operation. `device`: the type of the devices
    whose operations these are. `tuned`: what was measured to be fastest for matrix products."""

    machine: GpuMachine
    unsupported: Callable[[Operation], Refusal | None] = field(default=lambda operation: None)
    device: str = "cuda"
    tuned: Tuned = field(default_factory=dict)

    @property
    def run_memory(self) -> RunMemory:
        return RunMemory(alignment=self.machine.line_bytes, min_split=self.machine.min_split_bytes)

    @property
    def postponing(self) -> Postponing:
        machine = self.machine
        return Postponing(machine.min_grouped_launches, machine.max_bytes_between, machine.max_postponed_bytes)

    def refuses(self, operation: Operation) -> Refusal | None:
        if isinstance(operation, Scan) and not has_state(operation):
            return Refusal(f"no state for the scan {operation.combine.name}")
        return self.unsupported(operation) or refused(operation) or attention.refused(operation)

    def prepared(self, program: Program) -> Program:
        return prepare(program, self.machine, self.device, self.tuned)

    def slower(self, group: Group, member: Member, rows: tuple[Axis, ...]) -> Refusal | None:
        return slower(group, member, rows, self.machine)

    def alike(self, group: Group, buffer_table: BufferTable) -> Hashable:
        return alike(group, buffer_table, self.machine)

    def arranged(self, group: Group, inside: Iterable[str], buffer_table: BufferTable) -> BuiltKernel:
        return build(group, tuple(inside), buffer_table, self.machine, self.tuned)

    def grouped(self, run: Run, buffer_table: BufferTable, leaving: Collection[str], fuel: Fuel) -> Run:
        return Grouping(buffer_table, self.machine, leaving, fuel).grouped(run)

    def finished(self, run: Run, buffer_table: BufferTable) -> Run:
        return run
