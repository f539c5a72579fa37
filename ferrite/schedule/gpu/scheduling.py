"""A GPU's part in scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ferrite.errors import Refusal
from ferrite.ir.index import Axis
from ferrite.ir.program import Operation, Program, Scan
from ferrite.schedule.fusion.accesses import BufferTable, likely
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.stages import Stage
from ferrite.schedule.gpu.kernels import build
from ferrite.schedule.gpu.machine import GpuMachine
from ferrite.schedule.gpu.prepare import prepare
from ferrite.schedule.gpu.profit import slower
from ferrite.schedule.gpu.scatter import refused
from ferrite.schedule.loops.reductions import points
from ferrite.schedule.loops.scans import has_state
from ferrite.schedule.steps import Run
from ferrite.schedule.target import Built, RunMemory

LONG_SCAN_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class GpuScheduling:
    """`unsupported`: why the code generator cannot make a kernel of an operation. `device`: the type of the devices
    whose operations these are."""

    machine: GpuMachine
    unsupported: Callable[[Operation], Refusal | None] = field(default=lambda operation: None)
    device: str = "cuda"

    @property
    def run_memory(self) -> RunMemory:
        return RunMemory(alignment=self.machine.line, min_split=self.machine.min_split_bytes)

    def refuses(self, operation: Operation) -> Refusal | None:
        if isinstance(operation, Scan) and not has_state(operation):
            return Refusal(f"no state for the scan {operation.combine.name}")
        if isinstance(operation, Scan) and self.is_serial(operation):
            return Refusal("a few long scans would each be one program's")
        return self.unsupported(operation) or refused(operation)

    def is_serial(self, operation: Scan) -> bool:
        """Whether most of the machine would wait for a few programs. What torch has no operator for is a kernel."""
        rows = points(item for item in operation.axes if item is not operation.along)
        few = 4 * rows < self.machine.multiprocessors
        return few and likely(operation.along.extent) > LONG_SCAN_ELEMENTS and not operation.combine.results

    def prepared(self, program: Program) -> Program:
        return prepare(program, self.machine, self.device)

    def slower(self, group: Group, stage: Stage, rows: tuple[Axis, ...]) -> Refusal | None:
        return slower(group, stage, rows, self.machine)

    def arranged(self, group: Group, inside: Iterable[str], buffer_table: BufferTable) -> Built:
        return build(group, tuple(inside), buffer_table, self.machine)

    def finished(self, run: Run, buffer_table: BufferTable) -> Run:
        return run
