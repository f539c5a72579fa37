"""Kernels to addresses: equal kernels are compiled once in a process, new ones side by side."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.target import Target, host_target
from ferrite.ir.kernel import Kernel

_known: dict[Kernel, int] = {}
_lock = threading.Lock()


def addresses_of(kernels: Sequence[Kernel]) -> list[int]:
    """The address of each kernel's function."""
    with _lock:
        new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _known]
    if new:
        target = host_target()
        names = [kernel_name(kernel) for kernel in new]
        objects = dict(zip(names, compiled(new, names, target), strict=True))
        found = load(objects)
        with _lock:
            for kernel, name in zip(new, names, strict=True):
                _known.setdefault(kernel, found[name])
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
