"""From a loop program to a function of native code: schedule, generate, build, load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrite.codegen.llvm.emit import unsupported
from ferrite.codegen.llvm.target import host_target
from ferrite.codegen.native import NativeSource, print_native
from ferrite.ir.kernel import checks
from ferrite.ir.program import Operation, Program, Reduce, Scan
from ferrite.ir.questions import roots_of
from ferrite.ir.states import STATES
from ferrite.runtime.kernels import addresses_of
from ferrite.runtime.load import Boxed
from ferrite.runtime.native import load_native
from ferrite.schedule.machine import Machine
from ferrite.schedule.plan import Plan, make_plan
from ferrite.schedule.scans import has_state


@dataclass(frozen=True)
class NativeCode:
    plan: Plan
    source: NativeSource
    function: Boxed


def compile_program(program: Program, objects: Mapping[str, Any], verify: bool = False) -> NativeCode:
    machine = Machine(vector=4 * host_target().lanes)
    plan = make_plan(program, machine, not_native, verify)
    launches = plan.launches
    kernels = list(dict.fromkeys(launch.kernel for launch in launches))
    source = print_native(plan, {kernel: number for number, kernel in enumerate(kernels)})
    function = load_native(source, addresses_of(kernels), [checks(kernel) for kernel in kernels], objects)
    return NativeCode(plan, source, function)


def not_native(operation: Operation) -> str | None:
    """Why a loop operation cannot be a kernel; None where it can."""
    for root in roots_of(operation):
        why = unsupported(root)
        if why:
            return why
    if isinstance(operation, Scan) and not has_state(operation):
        return f"no state for the scan {operation.combine.name}"
    if isinstance(operation, Reduce) and operation.kind not in STATES:
        return f"no state for the reduction {operation.kind}"
    return None


def on_cpu(program: Program) -> bool:
    return all(buffer.device.type == "cpu" or buffer.kind == "foreign" for buffer in program.buffers)
