"""Kernels to addresses: equal kernels are compiled once in a process, new ones side by side."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.target import Target, host_target
from ferrite.ir.kernel import Kernel

_known: dict[Kernel, int] = {}
_lock = threading.Lock()


def build(kernels: Sequence[Kernel]) -> dict[str, bytes]:
    """Object code of the kernels that this process has not loaded yet, by name."""
    with _lock:
        new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _known]
    names = [kernel_name(kernel) for kernel in new]
    return dict(zip(names, compiled(new, names, host_target()), strict=True)) if new else {}


def addresses_of(kernels: Sequence[Kernel], objects: Mapping[str, bytes]) -> list[int]:
    """The address of each kernel's function. `objects`: what `build` gave for them."""
    found = load(objects) if objects else {}
    with _lock:
        for kernel in kernels:
            if kernel not in _known:
                _known[kernel] = found[kernel_name(kernel)]
        return [_known[kernel] for kernel in kernels]


def kernel_name(kernel: Kernel) -> str:
    return "kernel_" + hashlib.blake2b(str(kernel).encode(), digest_size=12).hexdigest()


def compiled(kernels: Sequence[Kernel], names: Sequence[str], target: Target) -> list[bytes]:
    def one(kernel: Kernel, name: str) -> bytes:
        return object_code(kernel_text(kernel, target, name), target)

    if len(kernels) == 1:
        return [one(kernels[0], names[0])]
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:  # LLVM works without Python's lock
        return list(pool.map(one, kernels, names))
