"""Native code for the processor that Python runs on, from LLVM: kernels of the CPU, the driver that runs tables of
them, and what launches the kernels of other devices. Code leaves the process with the last function that calls it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ferrite.codegen.llvm import (
    Image,
    Loaded,
    Processor,
    executable_memory,
    host_processor,
    image_of,
    is_image,
    link,
    object_code,
)
from ferrite.errors import NotLoaded, Refusal
from ferrite.runtime.code_memory import CodeMemory, KernelStore, kernels_done
from ferrite.runtime.forks import ready_for_forks

OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\x64\x86", b"\x64\xaa")  # as they begin: ELF, Mach-O, COFF
KNOWN = CodeMemory(max_bytes=2 << 20)

_loaded: weakref.WeakValueDictionary[str, Loaded] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Unit:
    """Something to compile: what it goes by, the text that says all about it, and its form for LLVM."""

    name: str
    text: str
    llvm: Callable[[Processor], str]


def object_codes(units: Sequence[Unit], store: KernelStore | None) -> dict[str, bytes]:
    """By name: from this process, else from the store, else from LLVM, new ones side by side."""
    return KNOWN.code_of(units, store, refusal_of_code, lambda new: compiled(new, host_processor()))


def compiled(units: Sequence[Unit], processor: Processor) -> list[bytes]:
    def one(unit: Unit) -> bytes:
        return loadable(object_code(unit.llvm(processor), processor))

    if len(units) == 1:
        return [one(units[0])]
    with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:  # LLVM works without Python's lock
        begun = [started(pool, one, unit) for unit in units]
        codes = []
        for unit, work in zip(units, begun, strict=True):
            codes.append(one(unit) if work is None else work.result())
            kernels_done(len(codes), len(units))
        return codes


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
    if not executable_memory.can_load():
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


def functions_here(names: Iterable[str]) -> dict[str, Loaded]:
    """Those of these functions that are loaded."""
    found = {name: _loaded.get(name) for name in names}
    return {name: function for name, function in found.items() if function is not None}


def loaded(name: str, code: bytes) -> Loaded:
    return executable_memory.load_image(name, Image.read(code)) if is_image(code) else link(name, code)
