"""A CPU's part in scheduling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

from ferrite.errors import Refusal
from ferrite.ir import Axis
from ferrite.ir.program import Operation, Program
from ferrite.machines import Machine
from ferrite.pipeline import Fuel
from ferrite.schedule.cpu import attention
from ferrite.schedule.cpu.kernels import build
from ferrite.schedule.cpu.parallel_regions import ParallelRegions
from ferrite.schedule.cpu.prepare import prepare
from ferrite.schedule.cpu.profit import slower
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.steps import Run
from ferrite.schedule.target import BuiltKernel, RunMemory


@dataclass(frozen=True)
class CpuScheduling:
    """`unsupported`: why the code generator cannot make a kernel of an operation."""

    machine: Machine
    unsupported: Callable[[Operation], Refusal | None] = field(default=lambda operation: None)

    @property
    def run_memory(self) -> RunMemory:
        return RunMemory(self.machine.line_bytes, self.machine.min_split_bytes)

    @property
    def postponing(self) -> None:
        return None  # see `alike`

    def refuses(self, operation: Operation) -> Refusal | None:
        return self.unsupported(operation) or attention.refused(operation)

    def prepared(self, program: Program) -> Program:
        return prepare(program, self.machine)

    def slower(self, group: Group, member: Member, rows: tuple[Axis, ...]) -> Refusal | None:
        return slower(group, member, rows, self.machine)

    def alike(self, group: Group, buffer_table: BufferTable) -> Hashable:
        return None  # a kernel is a call in the same native function: starting it costs next to nothing

    def arranged(self, group: Group, inside: Iterable[str], buffer_table: BufferTable) -> BuiltKernel:
        return build(group, inside, buffer_table, self.machine)

    def grouped(self, run: Run, buffer_table: BufferTable, leaving: Collection[str], fuel: Fuel) -> Run:
        return run  # one after the other they cost nothing; see `finished` for those that share a parallel region

    def finished(self, run: Run, buffer_table: BufferTable) -> Run:
        return ParallelRegions(buffer_table, self.machine).shared(run)
