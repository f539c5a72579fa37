"""Runs of kernels on a CPU: one native call each, through the driver."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ferrite.codegen import RunTable
from ferrite.codegen.llvm import DIVISION, OUT_OF_MEMORY, TableAddress, bound, pack_steps
from ferrite.ir import out_of_bounds


@dataclass(frozen=True)
class Kernels:
    """Kernels in this process, by number: the address of each, and what it says where one of its checks fails; the
    address of the driver that runs them; what keeps all of them in memory."""

    addresses: Sequence[int]
    complaints: Sequence[Sequence[str]]
    driver: int
    keep_alive: Sequence[Any] = ()


def native_run(table: RunTable, kernels: Kernels) -> Callable[..., int]:
    """A function of the number of threads, and of the words that a run needs: addresses and sizes."""
    calls = [(kernels.addresses[call.kernel], call.arguments) for call in table.calls]
    steps = pack_steps(calls, table.slots, [(each.first, each.count, each.threads) for each in table.parallel_regions])
    kept = ctypes.create_string_buffer(steps, len(steps))
    complaints = [(*kernels.complaints[call.kernel], *call.complaints) for call in table.calls]

    def fail(result: int, value: int, extent: int, step: int) -> None:
        raise problem(result, value, extent, complaints[step])

    native = TableAddress(ctypes.addressof(kept))
    native.needs, native.fail = (kept, kernels.keep_alive), fail
    return bound(kernels.driver, native)


def problem(result: int, value: int, extent: int, complaints: Sequence[str]) -> Exception:
    """The error that eager raises where a check of a kernel failed."""
    if result == OUT_OF_MEMORY:
        return RuntimeError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {value} bytes. "
            f"Error code {errno.ENOMEM} ({os.strerror(errno.ENOMEM)})"
        )
    if result == DIVISION:
        return RuntimeError("ZeroDivisionError")
    return out_of_bounds(complaints[result - 1], value, extent)
