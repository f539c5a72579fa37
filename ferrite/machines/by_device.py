"""Which machine a device is, for those who have no target."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ferrite.machines.any_machine import AnyMachine
from ferrite.machines.cpu import NEOVERSE_N1, XEON, Machine
from ferrite.machines.gpu import H200, GpuMachine


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
