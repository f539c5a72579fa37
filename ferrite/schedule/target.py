"""What differs from device to device while a program is scheduled, named once.

Which operations may become one kernel, what depends on what, how long values live, whose memory can be reused: that is
the same everywhere. A device says what it cannot do, which forms it likes, what would be slower, how loops are arranged
for its threads, and what becomes of kernels that follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ferrite.errors import Refusal
from ferrite.ir import Axis
from ferrite.ir.kernel import Kernel
from ferrite.ir.program import Operation, Program
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.steps import Run


@dataclass(frozen=True)
class BuiltKernel:
    """The kernel of a group. `arguments`: the storages behind its pointers."""

    kernel: Kernel
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class RunMemory:
    """What memory of a run is like on a device, in bytes. `alignment`: everything in it begins at a multiple of this;
    `min_split`: two runs, which are two native calls, must save this much over one."""

    alignment: int
    min_split: int


@dataclass(frozen=True)
class Postponing:
    """Kernels that a device would rather run at the end of a program, where equal ones are one launch: so many `alike`
    or more, which touch so many `bytes` at most. `kept`: bytes that they may hold until then, all together."""

    alike: int
    bytes: int
    kept: int


class Scheduling(Protocol):
    """One device's part in scheduling. All of it is about operations on that device."""

    @property
    def run_memory(self) -> RunMemory: ...

    @property
    def postponing(self) -> Postponing | None: ...

    def refuses(self, operation: Operation) -> Refusal | None:
        """Why a loop operation cannot be a kernel here; None where it can."""

    def prepared(self, program: Program) -> Program:
        """The program, with reductions and other operations in the forms that this device likes."""

    def slower(self, group: Group, member: Member, rows: tuple[Axis, ...]) -> Refusal | None:
        """Why a member in a group, row by row, would run slower than after it, though it may be there."""

    def alike(self, group: Group, buffer_table: BufferTable) -> Hashable:
        """What two groups must have in common to be one kernel though they need nothing of each other; None for a group
        that is better alone."""

    def arranged(self, group: Group, inside: Iterable[str], buffer_table: BufferTable) -> BuiltKernel:
        """A group as a kernel: loops for threads and vectors, or grids and blocks. `inside`: storages that nothing else
        accesses."""

    def grouped(self, run: Run, buffer_table: BufferTable, leaving: Collection[str], fuel: Fuel) -> Run:
        """Launches that follow each other, with those as one that are alike and independent, before anything is known
        of where their memory is. `leaving`: storages that leave the program. A group spends one unit of fuel."""

    def finished(self, run: Run, buffer_table: BufferTable) -> Run:
        """Launches that follow each other, with what can be done about all of them at once."""


Schedulings = Mapping[str, Scheduling]  # by the type of the device
