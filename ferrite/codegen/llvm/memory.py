"""Images into memory that can be run."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from typing import Any

from ferrite.codegen.llvm.image import Image
from ferrite.codegen.llvm.runtime_symbols import PARALLEL, runtime_symbol

READ_AND_RUN = 1 | 4
_alive: list[Any] = []  # what is loaded stays: functions may be called as long as the process lives


def can_load() -> bool:
    """Whether this system lets pages be filled and then run, and has the functions that kernels call."""
    return sys.platform == "linux" and all(map(runtime_symbol, PARALLEL))


def load_images(images: Mapping[str, Image]) -> dict[str, int]:
    """The address of the function in each image that goes by its name. Pages are written first, and can be run only
    when they can be written no more; that is also when Linux makes the processor fetch them anew."""
    starts, total = {}, 0
    for name, image in images.items():
        if image.fixed < len(image.code) and image.fixed % mmap.PAGESIZE:
            raise ValueError("an image for a machine with smaller pages")
        starts[name] = total
        total += -(-len(image.code) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name, image in images.items():
        start = starts[name]
        pages[start : start + len(image.code)] = image.code
        for symbol, place in image.words.items():
            pages[start + place : start + place + 8] = address_of(symbol).to_bytes(8, "little")
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for name, image in images.items():
        make_executable(address + starts[name], image.fixed)
    _alive.append(pages)
    return {name: address + starts[name] + image.exports[name] for name, image in images.items()}


def address_of(symbol: str) -> int:
    found = runtime_symbol(symbol)
    if found is None:
        raise RuntimeError(f"a kernel calls {symbol}, which is not in this process")
    return found


def make_executable(address: int, size: int) -> None:
    system = ctypes.CDLL(None, use_errno=True)
    if system.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), READ_AND_RUN):
        raise OSError(ctypes.get_errno(), "pages with code cannot be made executable")
