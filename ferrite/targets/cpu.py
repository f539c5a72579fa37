"""The processor that Python runs on: kernels of LLVM, compiled inside the process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ferrite.codegen import CpuSpelling, RunTable
from ferrite.codegen.llvm import Loaded, entry, host_processor, is_narrow, kernel_rows, machine_text, unsupported
from ferrite.errors import Refusal
from ferrite.ir import STATES
from ferrite.ir.kernel import Kernel, Row
from ferrite.ir.program import Operation, Reduce, Scan, roots_of
from ferrite.machines import Machine, host_machine
from ferrite.runtime import KernelStore, functions_here, functions_of, one_by_one
from ferrite.runtime.cpu import Kernels, build, built_from, native_run, source_of
from ferrite.schedule import INTERPRETED
from ferrite.schedule.cpu import CpuScheduling
from ferrite.schedule.loops import has_state
from ferrite.targets.cpu_caches import data_caches
from ferrite.targets.target import LoadedRun


class CpuTarget:
    language = "LLVM"
    spelling = CpuSpelling()

    @functools.cached_property
    def scheduling(self) -> CpuScheduling:
        host, caches = host_processor(), data_caches()
        machine = replace(host_machine(), vector_bytes=4 * host.lanes, registers=host.registers)
        if 1 in caches:
            machine = replace(machine, l1_way_bytes=caches[1].way_bytes)
        if 2 in caches:
            machine = replace(machine, l2_bytes=caches[2].share)
        return CpuScheduling(machine, refusal_of_operation)

    def identity(self) -> str:
        return f"{machine_text()} {data_caches()}"

    def compiled(
        self, kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
    ) -> tuple[list[str], dict[str, bytes]]:
        return build(kernels, store, checked)

    def source(self, kernel: Kernel, checked: bool = False) -> tuple[str, str]:
        return ".ll", source_of(kernel, checked)

    def source_rows(self, kernel: Kernel, name: str) -> list[Row]:
        return kernel_rows(kernel, host_processor(), name)

    def built_from(self, kernel: Kernel, text: str, checked: bool = False) -> tuple[str, bytes]:
        return built_from(kernel, text, checked)

    def loaded(
        self, kernels: Sequence[tuple[str, Sequence[str]]], code: Mapping[str, bytes], tables: Sequence[RunTable]
    ) -> list[LoadedRun]:
        kernel_table = kernels_in(functions_of(code), kernels)
        return [native_run(table, kernel_table) for table in tables]

    def named(
        self, kernels: Sequence[tuple[str, Sequence[str]]], table: RunTable, labels: Sequence[str], run: LoadedRun
    ) -> LoadedRun:
        kernel_table = kernels_in(functions_here([entry.NAME, *(name for name, _complaints in kernels)]), kernels)
        alone = [replace(table, calls=(call,), parallel_regions=()) for call in table.calls]
        return one_by_one([(label, native_run(each, kernel_table)) for label, each in zip(labels, alone, strict=True)])


def kernels_in(found: Mapping[str, Loaded], kernels: Sequence[tuple[str, Sequence[str]]]) -> Kernels:
    """Kernels by number, of the functions that are loaded."""
    addresses = [found[name].address if name in found else 0 for name, _complaints in kernels]
    complaints = [complaints for _name, complaints in kernels]
    driver = found[entry.NAME].address if entry.NAME in found else 0
    return Kernels(addresses, complaints, driver, tuple(found.values()))


class InterpretedTarget(CpuTarget):
    """The same processor without a compiler: the slow interpreter runs every operation."""

    @functools.cached_property
    def scheduling(self) -> CpuScheduling:
        return CpuScheduling(Machine(), lambda operation: INTERPRETED)

    def identity(self) -> str:
        return "any"


def refusal_of_operation(operation: Operation) -> Refusal | None:
    """Why a loop operation cannot be a kernel; None where it can."""
    for root in roots_of(operation):
        refusal = unsupported(root)
        if refusal is not None:
            return refusal
    if isinstance(operation, Scan) and not has_state(operation):
        return Refusal(f"no state for the scan {operation.combine.name}")
    if isinstance(operation, Reduce | Scan) and any(is_narrow(value.dtype) for value in operation.values):
        return Refusal("16-bit floats are no numbers to a state before they are widened")
    if isinstance(operation, Reduce) and operation.kind not in STATES:
        return Refusal(f"no state for the reduction {operation.kind}")
    return None


CPU = CpuTarget()
INTERPRETER = InterpretedTarget()
