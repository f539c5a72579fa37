"""A target in one file: it keeps kernels as text, and the interpreter runs them. What a new target has to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrite.codegen import KernelCall, RunTable
from ferrite.errors import Refusal
from ferrite.ir import Index
from ferrite.ir.kernel import Kernel, parse_kernel, run_kernel
from ferrite.ir.program import Operation, Scan
from ferrite.machines import Machine
from ferrite.runtime import KernelStore, in_range
from ferrite.schedule.cpu import CpuScheduling
from ferrite.targets.target import LoadedRun


class ToySpelling:
    """Runs are given tensors, not addresses: there is nothing native about them."""

    can_do_without_arena = False

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return ()

    def launch_words(self, kernel: Kernel) -> tuple[Index, ...]:
        return ()

    def launch_memory(self, kernel: Kernel) -> int:
        return 0

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        return f"empty_strided({sizes}, {strides}, dtype={dtype})"

    def arena(self, size: int, device: torch.device) -> str:
        return self.allocation(f"({size},)", "(1,)", torch.uint8, device, size)

    def address(self, tensor: str) -> str:
        return tensor


class ToyTarget:
    language = "kernels as text"
    spelling = ToySpelling()
    scheduling = CpuScheduling(Machine(), lambda operation: no_scans(operation))

    def __init__(self) -> None:
        self.launched: list[str] = []

    def identity(self) -> str:
        return "toy 1"

    def compiled(
        self, kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
    ) -> tuple[list[str], dict[str, bytes]]:
        names = [f"toy_{number}" for number in range(len(kernels))]
        return names, {name: str(kernel).encode() for name, kernel in zip(names, kernels, strict=True)}

    def source(self, kernel: Kernel, checked: bool = False) -> tuple[str, str]:
        return ".py", str(kernel)

    def source_rows(self, kernel: Kernel, name: str) -> list[tuple[str, int | None]]:
        return [(line, None) for line in str(kernel).splitlines()]

    def built_from(self, kernel: Kernel, text: str, checked: bool = False) -> tuple[str, bytes]:
        return "toy_again", text.encode()

    def loaded(
        self, kernels: Sequence[tuple[str, Sequence[str]]], code: Mapping[str, bytes], tables: Sequence[RunTable]
    ) -> list[LoadedRun]:
        parsed = [parse_kernel(code[name].decode()) for name, _complaints in kernels]
        return [self.run_of(table, parsed) for table in tables]

    def named(
        self, kernels: Sequence[tuple[str, Sequence[str]]], table: RunTable, labels: Sequence[str], run: LoadedRun
    ) -> LoadedRun:
        return in_range("; ".join(labels), run)

    def run_of(self, table: RunTable, kernels: Sequence[Kernel]) -> LoadedRun:
        def run(*words: Any) -> int:
            slots = words if table.arena else (None, *words)
            for call in table.calls:
                kernel = kernels[call.kernel]
                self.launched.append(f"toy_{call.kernel}")
                run_kernel(kernel, list(memory_of(kernel, call, slots)), sizes_of(kernel, call, slots))
            return 0

        return run


def no_scans(operation: Operation) -> Refusal | None:
    return Refusal("the toy has no scans") if isinstance(operation, Scan) else None


def memory_of(kernel: Kernel, call: KernelCall, slots: Sequence[Any]) -> Any:
    """One flat tensor for each pointer, from its first byte to the end of the storage."""
    for pointer, (slot, offset) in zip(kernel.pointers, call.arguments, strict=False):
        tensor = slots[slot]
        start = tensor.storage_offset() * tensor.dtype.itemsize + offset
        count = (tensor.untyped_storage().nbytes() - start) // pointer.dtype.itemsize
        flat = torch.empty(0, dtype=pointer.dtype)
        yield flat.set_(tensor.untyped_storage(), start // pointer.dtype.itemsize, (count,), (1,))


def sizes_of(kernel: Kernel, call: KernelCall, slots: Sequence[Any]) -> list[int]:
    return [slots[slot] for slot, _offset in call.arguments[len(kernel.pointers) :]]
