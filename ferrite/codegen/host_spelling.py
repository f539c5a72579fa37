"""How a host program says what differs by device: making memory, and what a run of kernels is given besides."""

from __future__ import annotations

from typing import Protocol

import torch


class HostSpelling(Protocol):
    @property
    def run_arguments(self) -> tuple[str, ...]:
        """Of every run on this device, before addresses and sizes."""

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, count: int) -> str:
        """An expression that makes a tensor; `count`: how many bytes that takes, about."""

    def address(self, tensor: str) -> str:
        """What a run is given for a tensor."""


class CpuSpelling:
    LARGE_BYTES = 32 << 20  # from here on memory comes fresh from the system: see `ferrite.runtime.cpu.pages`
    run_arguments = ("threads()",)

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, count: int) -> str:
        maker = "large_on_cpu" if count >= self.LARGE_BYTES else "empty_on_cpu"
        return f"{maker}({sizes}, {strides}, {dtype})"

    def address(self, tensor: str) -> str:
        return f"{tensor}.data_ptr()"


class EagerSpelling:
    """A device that torch knows and that no kernels are made for."""

    run_arguments: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocation(self, sizes: str, strides: str, dtype: torch.dtype, count: int) -> str:
        return f"empty_strided({sizes}, {strides}, dtype={dtype}, device={str(self.device)!r})"

    def address(self, tensor: str) -> str:
        return f"{tensor}.data_ptr()"
