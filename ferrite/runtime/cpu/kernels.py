"""Kernels to addresses. Equal kernels are compiled once: in a process, and for all processes that share a cache.

A kernel goes by a name that its text gives it. The driver, which runs tables of kernels, is one more of them. The code
of a kernel leaves the process with the last function that calls it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from ferrite.codegen.llvm import (
    Image,
    Loaded,
    Processor,
    entry,
    host_processor,
    image_of,
    is_image,
    kernel_text,
    link,
    memory,
    object_code,
)
from ferrite.errors import NotLoaded, Refusal
from ferrite.ir.kernel import Kernel
from ferrite.runtime.cpu.forks import ready_for_forks

MAX_REMEMBERED_BYTES = 2 << 20  # bytes of object code
OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\x64\x86", b"\x64\xaa")  # as they begin: ELF, Mach-O, COFF

_code: dict[str, bytes] = {}  # used last of all, for graphs that share a kernel
_loaded: weakref.WeakValueDictionary[str, Loaded] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class KernelStore(Protocol):
    """Where object code is kept between processes, by the text of its kernel."""

    def fetch(self, name: str, text: str, check: Callable[[str, bytes], Refusal | None]) -> bytes | None:
        """Object code under a name that the check does not refuse."""

    def publish(self, text: str, code: bytes) -> None: ...


@dataclass(frozen=True)
class Unit:
    """Something to compile: what it goes by, the text that says all about it, and its form for LLVM."""

    name: str
    text: str
    llvm: Callable[[Processor], str]


def unit_of(kernel: Kernel, checked: bool = False) -> Unit:
    text = ("# checked\n" if checked else "") + str(replace(kernel, origins=()))  # where it comes from does not matter
    name = "kernel_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Unit(name, text, lambda processor: kernel_text(kernel, processor, name, checked))


DRIVER = Unit(entry.NAME, entry.ENTRY, lambda processor: entry.ENTRY)


def build(
    kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
) -> tuple[list[str], dict[str, bytes]]:
    """The name of each kernel, and object code by name: of all of them, and of the driver. `checked`: no kernel touches
    what is not its own, see `ferrite.codegen.llvm.bounds`."""
    units = [unit_of(kernel, checked) for kernel in kernels]
    return [unit.name for unit in units], object_codes([*units, DRIVER] if units else [], store)


def object_codes(units: Sequence[Unit], store: KernelStore | None) -> dict[str, bytes]:
    """From this process, else from the store, else from LLVM, new ones side by side."""
    with _lock:
        found = {unit.name: _code[unit.name] for unit in units if unit.name in _code}
    missing = [unit for unit in units if unit.name not in found]
    for unit in missing if store is not None else ():
        code = store.fetch(unit.name, unit.text, refusal_of_code) if store is not None else None
        if code is not None:
            found[unit.name] = code
    new = [unit for unit in missing if unit.name not in found]
    for unit, code in zip(new, compiled(new, host_processor()), strict=True) if new else ():
        found[unit.name] = code
        if store is not None:
            store.publish(unit.text, code)
    with _lock:
        remember(found)
    return found


def remember(new: Mapping[str, bytes]) -> None:
    """Keep object code, and forget what has not been used for longest."""
    for name, code in new.items():
        _code.pop(name, None)
        _code[name] = code
    size = sum(map(len, _code.values()))
    while size > MAX_REMEMBERED_BYTES:
        size -= len(_code.pop(next(iter(_code))))


def compiled(units: Sequence[Unit], processor: Processor) -> list[bytes]:
    def one(unit: Unit) -> bytes:
        return loadable(object_code(unit.llvm(processor), processor))

    if len(units) == 1:
        return [one(units[0])]
    with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:  # LLVM works without Python's lock
        begun = [started(pool, one, unit) for unit in units]
        return [one(unit) if work is None else work.result() for unit, work in zip(units, begun, strict=True)]


def started(pool: ThreadPoolExecutor, work: Callable[[Unit], bytes], unit: Unit) -> Future[bytes] | None:
    """Work in another thread; None where there is none to be had: the process is about to end, or has too many."""
    try:
        return pool.submit(work, unit)
    except RuntimeError:
        return None


def refusal_of_code(name: str, code: bytes) -> Refusal | None:
    """Why object code from elsewhere cannot be loaded under a name; None where it can."""
    if not is_image(code) and not code.startswith(OBJECT_FILES):
        return Refusal("it holds no object code")
    try:
        loaded(name, code)
    except Exception as problem:  # whatever is wrong with an entry costs the entry
        return Refusal(f"{type(problem).__name__}: {problem}")
    return None


def loadable(code: bytes) -> bytes:
    """An image where one can be made and loaded; otherwise the object itself."""
    if not memory.can_load():
        return code
    try:
        return bytes(image_of(code))
    except NotLoaded:
        return code


def functions_of(objects: Mapping[str, bytes]) -> dict[str, Loaded]:
    """The function in each object. What this process has under the same name is not loaded again."""
    ready_for_forks()
    found = {name: _loaded.get(name) or loaded(name, code) for name, code in objects.items()}
    with _lock:  # another thread may have loaded one in the meantime: the first one stays
        return {name: _loaded.setdefault(name, function) for name, function in found.items()}


def loaded(name: str, code: bytes) -> Loaded:
    return memory.load_image(name, Image.read(code)) if is_image(code) else link(name, code)
