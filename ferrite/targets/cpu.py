"""The processor that Python runs on: kernels of LLVM, compiled inside the process.

`CPU` makes kernels of everything that it can. `CALLS` makes none: every operator is one call of torch's, which needs no
LLVM. `INTERPRETER` lowers everything and compiles nothing: the slow interpreter runs each operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferrite.codegen import Executable, print_host
from ferrite.codegen.llvm import entry
from ferrite.codegen.llvm.emit import unsupported
from ferrite.codegen.llvm.target import host_target, machine_text
from ferrite.codegen.llvm.types import is_narrow
from ferrite.ir.kernel import checks
from ferrite.ir.program import Operation, Program, Reduce, Scan
from ferrite.ir.questions import roots_of
from ferrite.ir.states import STATES
from ferrite.runtime import Kernels
from ferrite.runtime.cpu import KernelStore, build, functions_of
from ferrite.schedule.machine import Machine
from ferrite.schedule.plan import Plan, make_plan
from ferrite.schedule.scans import has_state


class CpuTarget:
    devices = frozenset({"cpu"})

    def identity(self) -> str:
        return machine_text()

    def refuses(self, operation: Operation) -> str | None:
        for root in roots_of(operation):
            why = unsupported(root)
            if why:
                return why
        if isinstance(operation, Scan) and not has_state(operation):
            return f"no state for the scan {operation.combine.name}"
        if isinstance(operation, Reduce | Scan) and any(is_narrow(value.dtype) for value in operation.values):
            return "16-bit floats are no numbers to a state before they are widened"
        if isinstance(operation, Reduce) and operation.kind not in STATES:
            return f"no state for the reduction {operation.kind}"
        return None

    def scheduled(self, program: Program, verify: bool = False) -> Plan:
        return make_plan(program, Machine(vector=4 * host_target().lanes), self.refuses, verify)

    def compiled(self, plan: Plan, store: KernelStore | None = None, checked: bool = False) -> Executable:
        kernels = tuple(dict.fromkeys(launch.kernel for launch in plan.launches))
        source = print_host(plan, {kernel: number for number, kernel in enumerate(kernels)}, checked)
        names, code = build(kernels, store, checked)
        complaints = [tuple(check.complaint for check in checks(kernel)) for kernel in kernels]
        return Executable(source, tuple(zip(names, complaints, strict=True)), code)

    def loaded(self, executable: Executable) -> Kernels:
        found = functions_of(executable.code)
        addresses = [found[name].address for name, _complaints in executable.kernels]
        complaints = [complaints for _name, complaints in executable.kernels]
        run = found[entry.NAME].address if entry.NAME in found else 0
        return Kernels(addresses, complaints, run, tuple(found.values()))


@dataclass(frozen=True)
class WithoutKernels(CpuTarget):
    """Nothing becomes a kernel, for one reason."""

    reason: str
    devices: frozenset[str] = frozenset()

    def identity(self) -> str:
        return "any"

    def refuses(self, operation: Operation) -> str | None:
        return self.reason

    def scheduled(self, program: Program, verify: bool = False) -> Plan:
        return make_plan(program, Machine(), self.refuses, verify)


class Interpreter(WithoutKernels):
    def scheduled(self, program: Program, verify: bool = False) -> Plan:
        """Nothing is left out: whatever the interpreter runs, it was asked to run."""
        return replace(super().scheduled(program, verify), alone={})


CPU = CpuTarget()
CALLS = WithoutKernels("no kernels are made")
INTERPRETER = Interpreter("the interpreter runs it", CPU.devices)
