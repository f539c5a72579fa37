"""From a loop program to a function of native code: schedule, generate, load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrite.codegen.llvm import entry
from ferrite.codegen.llvm.emit import unsupported
from ferrite.codegen.llvm.target import host_target
from ferrite.codegen.llvm.types import is_narrow
from ferrite.codegen.native import NativeSource, print_native
from ferrite.ir.kernel import checks
from ferrite.ir.program import Operation, Program, Reduce, Scan
from ferrite.ir.questions import roots_of
from ferrite.ir.states import STATES
from ferrite.runtime.kernels import KernelCache, build, functions_of
from ferrite.runtime.load import Boxed
from ferrite.runtime.native import Kernels, load_native
from ferrite.schedule.machine import Machine
from ferrite.schedule.plan import Plan, make_plan
from ferrite.schedule.scans import has_state


@dataclass(frozen=True)
class NativeCode:
    """Text and object code of a plan. `kernels`: the name of each, by its number, and what it says where a check of it
    fails. `code`: object code by name, the driver's too."""

    source: NativeSource
    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    code: Mapping[str, bytes]


def schedule(program: Program, verify: bool = False) -> Plan:
    return make_plan(program, Machine(vector=4 * host_target().lanes), not_native, verify)


def generate(plan: Plan, cache: KernelCache | None = None, checked: bool = False) -> NativeCode:
    """`checked`: kernels compare every address with the bounds of its memory."""
    kernels = tuple(dict.fromkeys(launch.kernel for launch in plan.launches))
    source = print_native(plan, {kernel: number for number, kernel in enumerate(kernels)}, checked)
    names, code = build(kernels, cache, checked)
    complaints = [tuple(check.complaint for check in checks(kernel)) for kernel in kernels]
    return NativeCode(source, tuple(zip(names, complaints, strict=True)), code)


def load(code: NativeCode, objects: Mapping[str, Any]) -> Boxed:
    """`objects`: what the program names beside its inputs."""
    found = functions_of(code.code)
    addresses = [found[name].address for name, _complaints in code.kernels]
    complaints = [complaints for _name, complaints in code.kernels]
    run = found[entry.NAME].address if entry.NAME in found else 0
    kernels = Kernels(addresses, complaints, run, tuple(found.values()))
    return load_native(code.source, kernels, objects)


def not_native(operation: Operation) -> str | None:
    """Why a loop operation cannot be a kernel; None where it can."""
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


def on_cpu(program: Program) -> bool:
    return all(buffer.device.type == "cpu" or buffer.kind == "foreign" for buffer in program.buffers)
