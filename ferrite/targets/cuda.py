"""GPUs of NVIDIA: kernels of Triton, launched through CUDA's driver."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from ferrite.codegen import CudaSpelling, RecordedPart, RunTable
from ferrite.codegen.llvm import machine_text
from ferrite.codegen.triton import kernel_rows, unsupported_operation
from ferrite.ir.kernel import Kernel, Row
from ferrite.machines import GpuMachine, gpu_machine
from ferrite.runtime import KernelStore, in_range
from ferrite.runtime.cuda import (
    Driver,
    GpuKind,
    Recorder,
    build,
    built_from,
    cuda_run,
    graphs_of,
    kernel_from,
    launcher_of,
    libcuda,
    source_of,
    writers_in,
)
from ferrite.schedule.gpu import GpuScheduling
from ferrite.targets.target import LoadedRun


class CudaTarget:
    language = "Triton"
    spelling = CudaSpelling()

    @functools.cached_property
    def scheduling(self) -> GpuScheduling:
        return GpuScheduling(machine_of(torch.cuda.get_device_properties(0)), unsupported_operation)

    @functools.cached_property
    def driver(self) -> Driver:
        return libcuda()

    @functools.cached_property
    def processor(self) -> GpuKind:
        """All GPUs of this process have the same capability: see `ferrite.targets.choose`."""
        many: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        shared = min(each.shared_memory_per_block_optin for each in many)
        return GpuKind(10 * many[0].major + many[0].minor, shared)

    def identity(self) -> str:
        """The processor of the host counts too: launches are native code."""
        every = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        # by number: where random numbers are drawn, programs know how many threads one GPU has
        names = dict.fromkeys(f"{each.name} with {each.multi_processor_count}" for each in every)
        versions = f"compute {self.processor.capability}, CUDA {libcuda().version()}, Triton {triton_version()}"
        return f"{', '.join(names)}, {versions}; {machine_text()}"

    def compiled(
        self, kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
    ) -> tuple[list[str], dict[str, bytes]]:
        """No kernel is given the bounds of its memory here: what `checked` asks for is the CPU's."""
        return build(kernels, self.processor, store)

    def source(self, kernel: Kernel, checked: bool = False) -> tuple[str, str]:
        return ".py", source_of(kernel, self.processor)

    def source_rows(self, kernel: Kernel, name: str) -> list[Row]:
        return kernel_rows(kernel, name)

    def built_from(self, kernel: Kernel, text: str, checked: bool = False) -> tuple[str, bytes]:
        return built_from(kernel, self.processor, text)

    def loaded(
        self, kernels: Sequence[tuple[str, Sequence[str]]], code: Mapping[str, bytes], tables: Sequence[RunTable]
    ) -> list[LoadedRun]:
        known = {place: kernel_from(code[name]) for place, (name, _complaints) in enumerate(kernels) if name in code}
        launcher = launcher_of(code)
        writers = writers_in(code)
        return [cuda_run(table, known, self.driver, launcher, writers) for table in tables]

    def named(
        self, kernels: Sequence[tuple[str, Sequence[str]]], table: RunTable, labels: Sequence[str], run: LoadedRun
    ) -> LoadedRun:
        """Kernels that follow each other are started as one."""
        return in_range("; ".join(dict.fromkeys(labels)), run)

    def recorder(self, part: RecordedPart) -> Recorder:
        """What records a part of a host program, and replays it."""
        return Recorder(part, functools.partial(graphs_of, int(part.device.partition(":")[2] or 0)))


def triton_version() -> str:
    if find_spec("triton") is None:
        return "none"
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # some wheels have another name
        import triton

        return str(triton.__version__)


def machine_of(properties: Any) -> GpuMachine:
    """What torch says of a GPU."""
    return replace(
        gpu_machine(),
        multiprocessors=properties.multi_processor_count,
        threads=properties.max_threads_per_multi_processor,
        registers=properties.regs_per_multiprocessor,
        cache_bytes=properties.L2_cache_size,
        has_descriptors=properties.major >= 9,
    )


CUDA = CudaTarget()
