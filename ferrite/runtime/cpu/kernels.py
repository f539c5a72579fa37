"""Kernels to object code. A kernel goes by a name that its text gives it. The driver, which runs tables of kernels, is
one more of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from ferrite.codegen.llvm import entry, host_processor, kernel_text
from ferrite.ir.kernel import Kernel
from ferrite.runtime.code_memory import KernelStore
from ferrite.runtime.host_code import Unit, compiled, object_codes

DRIVER = Unit(entry.NAME, entry.ENTRY, lambda processor: entry.ENTRY)


def build(
    kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
) -> tuple[list[str], dict[str, bytes]]:
    """The name of each kernel, and object code by name: of all of them, and of the driver. `checked`: no kernel touches
    what is not its own, see `ferrite.codegen.llvm.bounds`."""
    units = [unit_of(kernel, checked) for kernel in kernels]
    return [unit.name for unit in units], object_codes([*units, DRIVER] if units else [], store)


def unit_of(kernel: Kernel, checked: bool = False) -> Unit:
    text = ("# checked\n" if checked else "") + str(replace(kernel, origins=()))  # where it comes from does not matter
    name = "kernel_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Unit(name, text, lambda processor: kernel_text(kernel, processor, name, checked))


def source_of(kernel: Kernel, checked: bool = False) -> str:
    """The text that LLVM is given."""
    return unit_of(kernel, checked).llvm(host_processor())


def built_from(kernel: Kernel, text: str, checked: bool = False) -> tuple[str, bytes]:
    """Another text for a kernel, edited by hand: the name that its code goes by, and the code."""
    name = "kernel_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    renamed = text.replace(unit_of(kernel, checked).name, name)
    return name, compiled([Unit(name, text, lambda processor: renamed)], host_processor())[0]
