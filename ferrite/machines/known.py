"""Which machine a device is, for those who have no target."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from ferrite.machines.cpu import NEOVERSE_N1, XEON, Machine
from ferrite.machines.gpu import H200, GpuMachine


class AnyMachine(Protocol):
    """What is asked of every device: seconds that a call of torch takes by itself, bytes a second that a copy reads and
    writes, and operations a second of matrix products on elements of so many bytes. And where memory costs more than
    work, which was measured together, as all that was compiled, and not number by number:

    max_recomputed_additions    at an element, up to which each reader computes it again: what writing it, and reading
    max_recomputed_loads        it, takes about
    max_asked_windows           over an element, up to which it asks all of them whether they took it; else they add to
                                memory where it is
    min_tiled_elements          along both axes of a transposition, for tiles to pay
    min_reused_elements         that are reduced, for a second reduction to take the first one's results
    max_held_product_bytes      of a product in training that is added up then, which kernels of torch hold in memory:
                                the table is in `passes/pre_grad/einsum.py`
    """

    @property
    def call_seconds(self) -> float: ...

    @property
    def copy_bytes_per_second(self) -> float: ...

    @property
    def max_recomputed_additions(self) -> int: ...

    @property
    def max_recomputed_loads(self) -> int: ...

    @property
    def max_asked_windows(self) -> int: ...

    @property
    def min_tiled_elements(self) -> int: ...

    @property
    def min_reused_elements(self) -> int: ...

    @property
    def max_held_product_bytes(self) -> int: ...

    def flops_per_second(self, itemsize: int) -> float: ...


@functools.cache
def host_machine() -> Machine:
    """The processor that Python runs on, as far as torch knows it."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    vectors = {"AVX512": (64, 32), "AVX2": (32, 16)}  # their bytes, and how many registers there are
    vector_bytes, registers = vectors.get(torch.backends.cpu.get_cpu_capability(), (16, 32))
    return replace(XEON if is_x86 else NEOVERSE_N1, vector_bytes=vector_bytes, registers=registers)


def gpu_machine() -> GpuMachine:
    """The GPU that was measured: what passes decide by is about the same on others, and a target asks its own."""
    return H200


MACHINES: Mapping[str, Callable[[], AnyMachine]] = {"cpu": host_machine, "cuda": gpu_machine}


def machine_of(device: torch.device) -> AnyMachine:
    """By the type of a device; one that nobody has measured is taken for a GPU."""
    return MACHINES.get(device.type, gpu_machine)()
