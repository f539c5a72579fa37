"""Images into memory that can be run."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass, field
from typing import Any

from ferrite.codegen.llvm.image import Image
from ferrite.codegen.llvm.runtime_symbols import PARALLEL, runtime_symbol

READ_AND_RUN = 1 | 4


@dataclass(frozen=True, eq=False)
class Loaded:
    """A function in this process. It may be called as long as this object lives: then its code goes, too."""

    address: int
    memory: Any = field(repr=False)


def can_load() -> bool:
    """Whether this system lets pages be filled and then run, and has the functions that kernels call."""
    return sys.platform == "linux" and all(map(runtime_symbol, PARALLEL))


def load_image(name: str, image: Image) -> Loaded:
    """The function in an image that goes by a name. Pages are written first, and can be run only when they can be
    written no more; that is also when Linux makes the processor fetch them anew."""
    if image.fixed < len(image.code) and image.fixed % mmap.PAGESIZE:
        raise ValueError("an image for a machine with smaller pages")
    pages = mmap.mmap(-1, len(image.code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[: len(image.code)] = image.code
    for symbol, place in image.words.items():
        pages[place : place + 8] = address_of(symbol).to_bytes(8, "little")
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    make_executable(address, image.fixed)
    return Loaded(address + image.exports[name], pages)


def address_of(symbol: str) -> int:
    found = runtime_symbol(symbol)
    if found is None:
        raise RuntimeError(f"a kernel calls {symbol}, which is not in this process")
    return found


def make_executable(address: int, size: int) -> None:
    system = ctypes.CDLL(None, use_errno=True)
    if system.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), READ_AND_RUN):
        raise OSError(ctypes.get_errno(), "pages with code cannot be made executable")
