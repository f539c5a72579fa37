"""What a target is: a device's way through the compiler, behind the passes.

Everything up to here is the same on every device. A target says which operations can be kernels there, makes kernels of
groups of them, compiles and loads these. The host program around the kernels is the same again.
"""

from __future__ import annotations

from typing import Protocol

from ferrite.codegen import Executable
from ferrite.ir.program import Operation, Program
from ferrite.runtime import Kernels
from ferrite.runtime.cpu import KernelStore
from ferrite.schedule.plan import Plan


class Target(Protocol):
    @property
    def devices(self) -> frozenset[str]:
        """The types of devices that it makes kernels for; operators on others are calls."""

    def identity(self) -> str:
        """For the cache: everything about the machine that code is chosen by."""

    def refuses(self, operation: Operation) -> str | None:
        """Why a loop operation cannot be a kernel here; None where it can."""

    def scheduled(self, program: Program, verify: bool = False) -> Plan:
        """The program as launches of kernels, calls, and the memory of both."""

    def compiled(self, plan: Plan, store: KernelStore | None = None, checked: bool = False) -> Executable:
        """`checked`: kernels compare every address with the bounds of its memory."""

    def loaded(self, executable: Executable) -> Kernels:
        """The kernels of an executable in this process."""
