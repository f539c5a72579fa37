"""How a host program says what differs by device: making memory, and what a run of kernels is given besides."""

from __future__ import annotations

from typing import Protocol

import torch

from ferrite.codegen.triton import fixed_launch, table_lengths
from ferrite.errors import NotGenerated
from ferrite.ir import Index
from ferrite.ir.kernel import Kernel


class HostSpelling(Protocol):
    can_do_without_arena: bool  # where there is no block as large: what would lie in it can have memory of its own

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        """Of every run on this device, before addresses and sizes."""

    def launch_words(self, kernel: Kernel) -> tuple[Index, ...]:
        """What a launch is given behind pointers and sizes, over the kernel's own sizes."""

    def launch_memory(self, kernel: Kernel) -> int:
        """Bytes of the arena that only a launch needs, as aligned as all that is in it. Where they are is given to the
        launch behind all else."""

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        """An expression that makes a tensor; `count`: how many bytes that takes, about."""

    def arena(self, size: int, device: torch.device) -> str:
        """An expression that makes the arena of a run."""

    def address(self, tensor: str) -> str:
        """What a run is given for a tensor."""


class CpuSpelling:
    can_do_without_arena = False
    LARGE_BYTES = 32 << 20  # from here on memory comes fresh from the system: see `ferrite.runtime.cpu.pages`

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return ("threads()",)

    def launch_words(self, kernel: Kernel) -> tuple[Index, ...]:
        return ()

    def launch_memory(self, kernel: Kernel) -> int:
        return 0

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        maker = "large_on_cpu" if count >= self.LARGE_BYTES else "empty_on_cpu"
        return f"{maker}({sizes}, {strides}, {dtype})"

    def arena(self, size: int, device: torch.device) -> str:
        return self.allocation(f"({size},)", "(1,)", torch.uint8, device, size)

    def address(self, tensor: str) -> str:
        return f"{tensor}.data_ptr()"


class CudaSpelling:
    """Memory comes from torch's allocator, for the stream that is current: as in eager, a tensor that is freed may be
    given to what is launched later on that stream, and to nothing else."""

    can_do_without_arena = True

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return (f"stream_of({device.index or 0})",)

    def launch_words(self, kernel: Kernel) -> tuple[Index, ...]:
        """How many programs there are, where sizes decide that, and what code promises of sizes."""
        try:
            launch = fixed_launch(kernel)
        except NotGenerated:  # who compiles it says so
            return ()
        programs = (launch.programs,) if launch.programs.atoms else ()
        return (*programs, *(word for _name, word in launch.promises))

    def launch_memory(self, kernel: Kernel) -> int:
        """For the table of a grouped kernel, or for descriptors."""
        if kernel.resident:
            try:
                return fixed_launch(kernel).memory
            except NotGenerated:  # who compiles it says so
                return 0
        return 8 * sum(table_lengths(kernel))

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        if not device.index:
            return f"empty_on_first_cuda({sizes}, {strides}, {dtype})"
        return f"empty_on_cuda({sizes}, {strides}, {dtype}, {device.index})"

    def arena(self, size: int, device: torch.device) -> str:
        return f"arena_on_cuda({size}, {device.index})" if device.index else f"arena_on_first_cuda({size})"

    def address(self, tensor: str) -> str:
        return f"{tensor}.data_ptr()"


class EagerSpelling:
    """A device that torch knows and that no kernels are made for."""

    can_do_without_arena = False

    def run_arguments(self, device: torch.device) -> tuple[str, ...]:
        return ()

    def launch_words(self, kernel: Kernel) -> tuple[Index, ...]:
        return ()

    def launch_memory(self, kernel: Kernel) -> int:
        return 0

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, device: torch.device, count: int) -> str:
        return f"empty_strided({sizes}, {strides}, dtype={dtype}, device={str(device)!r})"

    def arena(self, size: int, device: torch.device) -> str:
        return self.allocation(f"({size},)", "(1,)", torch.uint8, device, size)

    def address(self, tensor: str) -> str:
        return f"{tensor}.data_ptr()"
