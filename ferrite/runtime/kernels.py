"""Kernels to addresses. Equal kernels are compiled once: in a process, and for all processes that share a cache.

A kernel goes by a name that its text gives it. The driver, which runs tables of kernels, is one more of them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ferrite.codegen.llvm import driver, memory
from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.image import Image, NoImage, image_of, is_image
from ferrite.codegen.llvm.target import Target, host_target
from ferrite.ir.kernel import Kernel
from ferrite.runtime.cache import Store, kernel_key

_code: dict[str, bytes] = {}  # object code, for entries of graphs that share a kernel
_addresses: dict[str, int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class KernelCache:
    """Kernels on disk. `target` and `sources` as for the key of a graph."""

    store: Store
    target: str
    sources: str

    def fetch(self, text: str) -> bytes | None:
        found = self.store.fetch(kernel_key(text, target=self.target, sources=self.sources))
        return None if found is None else found.sections.get("code")

    def publish(self, text: str, code: bytes) -> None:
        self.store.publish(kernel_key(text, target=self.target, sources=self.sources), {"code": code}, {})


@dataclass(frozen=True)
class Unit:
    """Something to compile: what it goes by, the text that says all about it, and its form for LLVM."""

    name: str
    text: str
    llvm: Callable[[Target], str]


def unit_of(kernel: Kernel) -> Unit:
    text = str(replace(kernel, origins=()))  # where it comes from does not matter
    name = "kernel_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Unit(name, text, lambda target: kernel_text(kernel, target, name))


DRIVER = Unit(driver.NAME, driver.DRIVER, lambda target: driver.DRIVER)


def build(kernels: Sequence[Kernel], cache: KernelCache | None = None) -> tuple[list[str], dict[str, bytes]]:
    """The name of each kernel, and object code by name: of all of them, and of the driver."""
    units = list(map(unit_of, kernels))
    return [unit.name for unit in units], object_codes([*units, DRIVER] if units else [], cache)


def object_codes(units: Sequence[Unit], cache: KernelCache | None) -> dict[str, bytes]:
    """From this process, else from the cache, else from LLVM, new ones side by side."""
    with _lock:
        found = {unit.name: _code[unit.name] for unit in units if unit.name in _code}
    missing = [unit for unit in units if unit.name not in found]
    for unit in missing if cache is not None else ():
        code = cache.fetch(unit.text) if cache is not None else None
        if code is not None:
            found[unit.name] = code
    new = [unit for unit in missing if unit.name not in found]
    for unit, code in zip(new, compiled(new, host_target()), strict=True) if new else ():
        found[unit.name] = code
        if cache is not None:
            cache.publish(unit.text, code)
    with _lock:
        _code.update(found)
    return found


def compiled(units: Sequence[Unit], target: Target) -> list[bytes]:
    def one(unit: Unit) -> bytes:
        return loadable(object_code(unit.llvm(target), target))

    if len(units) == 1:
        return [one(units[0])]
    with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:  # LLVM works without Python's lock
        return list(pool.map(one, units))


def loadable(code: bytes) -> bytes:
    """An image where one can be made and loaded; otherwise the object itself."""
    if not memory.can_load():
        return code
    try:
        return bytes(image_of(code))
    except NoImage:
        return code


def addresses_of(objects: Mapping[str, bytes]) -> dict[str, int]:
    """The address of the function in each object. What this process has under the same name is not loaded again."""
    with _lock:
        new = {name: code for name, code in objects.items() if name not in _addresses}
    images = {name: Image.read(code) for name, code in new.items() if is_image(code)}
    others = {name: code for name, code in new.items() if name not in images}
    found = {**(memory.load_images(images) if images else {}), **(load(others) if others else {})}
    with _lock:
        for name, address in found.items():
            _addresses.setdefault(name, address)
        return {name: _addresses[name] for name in objects}
