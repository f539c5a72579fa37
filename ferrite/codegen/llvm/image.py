"""Object code that needs no linker any more: an image is copied to memory and runs wherever that is.

    object file    sections, and places in them that depend on where sections and functions of the process lie
    image          the sections one after the other, every place inside filled in; for each function of the process a
                   jump through a word, which is filled in when the image is loaded; on pages of their own, behind the
                   rest, what may be written

Making one takes the place of a linker for what kernels need: references between sections relative to the program
counter, and calls to functions of the process. What an object has beyond that, or one that is not ELF for x86-64 or
AArch64, is refused (`NotLoaded`): then LLVM's own linker loads the object. Loading an image needs neither LLVM nor a
linker, so that a process which finds all its code in the cache never loads them.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ferrite.errors import NotLoaded

MAGIC = b"ferrite image 1\n"
LENGTHS = struct.Struct("<II")  # of the JSON, and of the bytes behind it
ADDRESS_BYTES = 8  # bytes
PAGE_BYTES = 1 << 12  # references between pages of AArch64: an image begins at a multiple of it

X86, ARM = 62, 183  # machines of ELF
RELOCATABLE, PROGRAM_BITS, SYMBOL_TABLE, WITH_ADDENDS = 1, 1, 2, 4
WRITES, TAKES_MEMORY = 1, 2  # flags of sections
SECTION, SYMBOL, RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
UNDEFINED = 0  # the section of a symbol that lies elsewhere

# A jump to the address in the word at its end.
STUBS = {X86: bytes.fromhex("ff2500000000") + bytes(8), ARM: bytes.fromhex("5000005800021fd6") + bytes(8)}


@dataclass(frozen=True)
class Image:
    """`exports`: functions by name and place; `words`: places of the addresses of functions of the process; `fixed`:
    bytes at the beginning that nothing writes to any more: all, or whole pages."""

    code: bytes
    exports: Mapping[str, int]
    words: Mapping[str, int]
    fixed: int

    def __bytes__(self) -> bytes:
        about = json.dumps([dict(self.exports), dict(self.words), self.fixed]).encode()
        return MAGIC + LENGTHS.pack(len(about), len(self.code)) + about + self.code

    @staticmethod
    def read(data: bytes) -> Image:
        start = len(MAGIC) + LENGTHS.size
        length, count = LENGTHS.unpack_from(data, len(MAGIC))
        if len(data) != start + length + count:
            raise ValueError("an image that was cut short")
        exports, words, fixed = json.loads(data[start : start + length])
        for places, room in ((exports, 1), (words, ADDRESS_BYTES), ({"": fixed}, 0)):
            if not all(type(place) is int and 0 <= place <= count - room for place in places.values()):
                raise ValueError("an image that names places outside it")
        return Image(data[start + length :], exports, words, fixed)


def is_image(data: bytes) -> bool:
    return data.startswith(MAGIC)


# --- from an object file ----------------------------------------------------------------------------------------------


class Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class ObjectSymbol(NamedTuple):
    name: str
    section: int
    value: int
    is_global: bool


def image_of(data: bytes) -> Image:
    """The image of an object file."""
    return _Linking(data).image()


class _Linking:
    def __init__(self, data: bytes) -> None:
        self.data = data
        if data[:6] != b"\x7fELF\x02\x01":
            raise NotLoaded("it is not ELF of 64 bits in little endian")
        kind, self.machine = struct.unpack_from("<HH", data, 16)
        if kind != RELOCATABLE or self.machine not in STUBS:
            raise NotLoaded(f"it is for machine {self.machine}")
        (table,) = struct.unpack_from("<Q", data, 40)
        (count,) = struct.unpack_from("<H", data, 60)
        self.sections = [Section(*SECTION.unpack_from(data, table + SECTION.size * at)) for at in range(count)]
        self.symbols = list(self._symbols())
        self.places: dict[int, int] = {}  # of sections in the image
        self.words: dict[str, int] = {}
        self.image_bytes = bytearray()

    def _symbols(self) -> Iterator[ObjectSymbol]:
        for table in self.sections:
            if table.kind == SYMBOL_TABLE:
                names = self.sections[table.link]
                for at in range(table.offset, table.offset + table.size, SYMBOL.size):
                    name, info, _other, section, value, _size = SYMBOL.unpack_from(self.data, at)
                    start = names.offset + name
                    text = self.data[start : self.data.index(b"\0", start)].decode()
                    yield ObjectSymbol(text, section, value, info >> 4 != 0)

    def image(self) -> Image:
        placed = [number for number, section in enumerate(self.sections) if self.is_placed(section)]
        written = [number for number in placed if self.sections[number].flags & WRITES]
        for symbol in self.called():
            self.words[symbol] = self.append(STUBS[self.machine], 16) + len(STUBS[self.machine]) - 8
        for number in placed:
            if number not in written:
                self.place(number)
        if written:
            self.append(b"", max(PAGE_BYTES, mmap.PAGESIZE))
        fixed = len(self.image_bytes)
        for number in written:
            self.place(number)
        for section in self.relocations():
            self.relocate(section)
        exports = {
            symbol.name: self.places[symbol.section] + symbol.value
            for symbol in self.symbols
            if symbol.is_global and symbol.section in self.places
        }
        return Image(bytes(self.image_bytes), exports, self.words, fixed)

    def is_placed(self, section: Section) -> bool:
        """Whether a section is in memory while code runs. What unwinds the stack is left out: nothing is thrown."""
        if not section.flags & TAKES_MEMORY or not section.size or self.name_of(section).startswith(".eh_frame"):
            return False
        if section.kind != PROGRAM_BITS or section.alignment > PAGE_BYTES:
            raise NotLoaded(f"it has a section {self.name_of(section)} of a kind that kernels do not need")
        return True

    def name_of(self, section: Section) -> str:
        (names,) = struct.unpack_from("<H", self.data, 62)
        start = self.sections[names].offset + section.name
        return self.data[start : self.data.index(b"\0", start)].decode()

    def contents(self, section: Section) -> bytes:
        return self.data[section.offset : section.offset + section.size]

    def called(self) -> list[str]:
        """Functions that the object does not have itself."""
        return [symbol.name for symbol in self.symbols if symbol.section == UNDEFINED and symbol.name]

    def relocations(self) -> list[Section]:
        """The tables of references out of sections that are placed, once they all are."""
        return [item for item in self.sections if item.kind == WITH_ADDENDS and item.info in self.places]

    def place(self, number: int) -> None:
        section = self.sections[number]
        self.places[number] = self.append(self.contents(section), max(section.alignment, 1))

    def append(self, more: bytes, alignment: int) -> int:
        self.image_bytes += bytes(-len(self.image_bytes) % alignment)
        place = len(self.image_bytes)
        self.image_bytes += more
        return place

    def relocate(self, section: Section) -> None:
        start = self.places[section.info]
        for at in range(section.offset, section.offset + section.size, RELOCATION.size):
            offset, info, addend = RELOCATION.unpack_from(self.data, at)
            rule = RULES.get((self.machine, info & 0xFFFFFFFF))
            if rule is None:
                raise NotLoaded(f"it has a reference of kind {info & 0xFFFFFFFF}")
            target = self.place_of(self.symbols[info >> 32], rule in CALLS)
            rule(self.image_bytes, start + offset, target + addend)

    def place_of(self, symbol: ObjectSymbol, is_call: bool) -> int:
        if symbol.section in self.places:
            return self.places[symbol.section] + symbol.value
        if symbol.name not in self.words or not is_call:
            raise NotLoaded(f"it refers to {symbol.name or 'a section'}, which lies elsewhere")
        return self.words[symbol.name] - len(STUBS[self.machine]) + 8


# --- references, by machine and kind ----------------------------------------------------------------------------------


def relative_32(code: bytearray, at: int, target: int) -> None:
    """A distance in 32 bits."""
    struct.pack_into("<i", code, at, target - at)


def call_32(code: bytearray, at: int, target: int) -> None:
    struct.pack_into("<i", code, at, target - at)


def call_26(code: bytearray, at: int, target: int) -> None:
    """A call or jump of AArch64: a distance in words, in 26 bits."""
    distance = target - at
    if distance % 4 or not -(1 << 27) <= distance < 1 << 27:
        raise NotLoaded("a call goes too far")
    put_bits(code, at, 0, 26, distance >> 2)


def page_21(code: bytearray, at: int, target: int) -> None:
    """The distance in pages, in two parts."""
    distance = target // PAGE_BYTES - at // PAGE_BYTES
    if not -(1 << 20) <= distance < 1 << 20:
        raise NotLoaded("a reference goes too far")
    put_bits(code, at, 29, 2, distance)
    put_bits(code, at, 5, 19, distance >> 2)


def in_page(size: int) -> Callable[[bytearray, int, int], None]:
    """The place inside a page, counted in elements of so many bytes."""

    def fill(code: bytearray, at: int, target: int) -> None:
        place = target % PAGE_BYTES
        if place % size:
            raise NotLoaded("a reference to an element that is not aligned")
        put_bits(code, at, 10, 12, place // size)

    return fill


def put_bits(code: bytearray, at: int, low: int, count: int, value: int) -> None:
    (word,) = struct.unpack_from("<I", code, at)
    mask = ((1 << count) - 1) << low
    struct.pack_into("<I", code, at, (word & ~mask) | ((value << low) & mask))


RULES: dict[tuple[int, int], Callable[[bytearray, int, int], None]] = {
    (X86, 2): relative_32,
    (X86, 4): call_32,
    (ARM, 261): relative_32,
    (ARM, 275): page_21,
    (ARM, 277): in_page(1),
    (ARM, 278): in_page(1),
    (ARM, 282): call_26,
    (ARM, 283): call_26,
    (ARM, 284): in_page(2),
    (ARM, 285): in_page(4),
    (ARM, 286): in_page(8),
    (ARM, 299): in_page(16),
}
CALLS = (call_32, call_26)
