"""The source while it is written: its lines, names, blocks and helpers, and what kernel names mean in it."""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.codegen.triton.helpers import HELPERS
from ferrite.codegen.triton.indices import INDEX, WIDE, widened
from ferrite.codegen.triton.interleaved_loads import Pair
from ferrite.codegen.triton.launch import ALIGNMENT, DESCRIPTORS, NARROW, Block
from ferrite.ir import Atom, Axis, Const, Data, Expr, Index, Load, Number, Symbol
from ferrite.ir.kernel import Loop, Notes

INDENT = "    "
Dims = frozenset[int]
Lines = list["str | Lines"]
NO_DIMS: Dims = frozenset()
EVICT_FIRST, EVICT_LAST = (f', eviction_policy="evict_{which}"' for which in ("first", "last"))
RESERVED = {
    "triton",
    "tl",
    "libdevice",
    "failure",
    "pid",
    ALIGNMENT,
    DESCRIPTORS,
    INDEX,
    NARROW,
    *HELPERS,
    *dir(builtins),
    *keyword.kwlist,
}


@dataclass(frozen=True)
class Value:
    """Text of a value, and the dimensions of the block along which it differs. Its rank is the last of them, plus one;
    those between have size one."""

    text: str
    dims: Dims = NO_DIMS

    @property
    def rank(self) -> int:
        return max(self.dims, default=-1) + 1

    def at(self, rank: int) -> str:
        """The text at a higher rank: new dimensions come last. Numbers fit everywhere."""
        if not self.dims or self.rank == rank:
            return self.text
        base = self.text if self.text.isidentifier() else f"({self.text})"
        return f"{base}[{', '.join([':'] * self.rank + ['None'] * (rank - self.rank))}]"


@dataclass(frozen=True)
class Mask:
    """Which lanes count. `bounds`: the dimension whose extent this is, where surely one of its lanes is inside."""

    value: Value
    bounds: int | None = None


@dataclass(frozen=True)
class BlockAxis:
    axis: Axis
    block: Block
    whole: bool  # one block holds the axis: lane i is place i


@dataclass(frozen=True)
class Scope:
    """Where a statement stands: the dimensions of the block around it, and the lanes that count. `scan`: the dimension
    along which lanes come in order. `sorts`: the values of updates there are sorted."""

    axes: tuple[BlockAxis, ...] = ()
    masks: tuple[Mask, ...] = ()
    scan: int | None = None
    sorts: bool = False

    @property
    def dims(self) -> Dims:
        return frozenset(range(len(self.axes)))

    @property
    def elements(self) -> int:
        count = 1
        for item in self.axes:
            count *= item.block.most
        return count

    def shape(self, dims: Dims | None = None) -> str:
        """Of a value that differs along these dimensions, or along all."""
        dims = self.dims if dims is None else dims
        rank = max(dims, default=-1) + 1
        return f"[{', '.join(self.axes[dim].block.name if dim in dims else '1' for dim in range(rank))}]"


@dataclass(frozen=True)
class Tile:
    """Scratch memory as a block: one dimension for each of `blocks`, after the first `depth`. None: of size one."""

    text: str
    dtype: torch.dtype
    depth: int
    blocks: tuple[Block | None, ...]


class Known:
    """What lines above have computed already, so that nothing is loaded or computed twice in a block.

    A frame is a block of the source: what a loop or a condition computes inside is not known after it. What was read
    from memory is known until something is stored there.
    """

    def __init__(self) -> None:
        self.frames: list[dict[Any, Any]] = [{}]

    def get(self, key: Any) -> Any:
        return next((frame[key] for frame in reversed(self.frames) if key in frame), None)

    def __contains__(self, key: Any) -> bool:
        return any(key in frame for frame in self.frames)

    def set(self, key: Any, value: Any) -> None:
        self.frames[-1][key] = value

    def forget(self, buffers: Collection[str]) -> None:
        """`buffers` have changed. The first part of a key is a word, the second what was computed."""
        for frame in self.frames:
            for key in [key for key in frame if not _loads(key[1]).isdisjoint(buffers)]:
                del frame[key]

    def clear(self) -> None:
        for frame in self.frames:
            frame.clear()


def _loads(item: Any) -> frozenset[str]:
    if isinstance(item, Data):
        return item.value.loads
    return item.loads if isinstance(item, Expr) else frozenset()


@dataclass
class Module:
    """`functions`: helpers of this kernel alone, by name. `names`: every name that is taken. `quick`: all results have
    16 bits. `filled`: what a loaded block holds outside of which masks. `once`: memory that no cache need keep.
    `pairs`: loads of every second element, and of those behind.
    `last_readers`: loops after which it need not keep some memory, which others read before. `loops`: those around."""

    checks: tuple[Data, ...]
    quick: bool = False
    lines: Lines = field(default_factory=list)
    level: int = 1
    names: set[str] = field(default_factory=lambda: set(RESERVED))
    helpers: dict[str, None] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    blocks: dict[tuple[Index, int], Block] = field(default_factory=dict)
    atoms: dict[Atom, tuple[Value, bool]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    tiles: dict[str, Tile] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)
    table: str = ""  # of a grouped kernel: where a program finds its pointers
    known: Known = field(default_factory=Known)
    exact: frozenset[Expr] | None = None  # of a kernel that rounds some results to 16 bits: where digits matter
    beside_one: frozenset[Expr] = frozenset()  # exponentials whose smallest values do not matter
    bases: dict[Axis, str] = field(default_factory=dict)  # where the lanes of an axis begin
    once: frozenset[str] = frozenset()
    notes: Notes | None = None  # where lines are to say what they come from
    note: str = ""  # behind every line: for those who read the text
    at_least_one: set[str] = field(default_factory=set)  # names of values that are not below one, unless they are NaN
    products: set[str] = field(default_factory=set)  # names of values that are products
    last_readers: dict[str, Loop] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    filled: dict[str, tuple[Const, tuple[Mask, ...]]] = field(default_factory=dict)
    index_type: str = WIDE  # of indices that may not fit into 32 bits
    even: list[Index] = field(default_factory=list)  # what is promised to be a multiple of 16
    named: dict[tuple[Index, ...], str] = field(default_factory=dict)  # products of sizes that have a name
    wide_indices: dict[Index, None] = field(default_factory=dict)  # those that were printed
    drawn: frozenset[Symbol] = frozenset()  # where draws begin: 64 bits, whatever indices have
    pairs: dict[Load, Pair] = field(default_factory=dict)
    describes: bool = False  # whether blocks are loaded by descriptors where that can be
    descriptors: dict[str, str] = field(default_factory=dict)  # their names, by what makes them

    def eviction_of(self, buffer: str) -> str:
        """What a load says about what the cache should keep."""
        if buffer in self.last_readers:
            if self.loops and (self.loops[-1].axis.extent.high or math.inf) <= self.loops[-1].lanes:
                return ""  # a row that is loaded once
            is_last = bool(self.loops) and self.loops[-1] is self.last_readers[buffer]
            return EVICT_FIRST if is_last else EVICT_LAST
        return EVICT_FIRST if buffer in self.once else ""

    def fresh(self, wish: str) -> str:
        """A name that nothing else has: a loop must not carry what another statement named."""
        name, count = wish, 0
        while name in self.names:
            count += 1
            name = f"{wish}_{count}"
        self.names.add(name)
        return name

    def needs(self, helper: str) -> None:
        self.helpers[helper] = None

    def line(self, text: str) -> None:
        self.lines.append(INDENT * self.level + text + self.note)

    def note_of(self, value: Expr) -> str:
        """Behind the lines that compute a value."""
        return "" if self.notes is None else self.notes.value(self.note, value)

    def set(self, wish: str, text: str) -> str:
        name = self.fresh(wish)
        self.line(f"{name} = {text}")
        return name

    def descriptor(self, text: str) -> str:
        """A descriptor, which is made at the beginning of a program."""
        if text not in self.descriptors:
            self.descriptors[text] = self.fresh(f"d{len(self.descriptors)}")
        return self.descriptors[text]

    def widened(self, text: str) -> str:
        return widened(text, self.index_type)

    def slot(self) -> Lines:
        """A place for lines that are known later."""
        lines: Lines = []
        self.lines.append(lines)
        return lines

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        self.line(head)
        before = len(self.lines)
        self.level += 1
        self.known.frames.append({})
        yield
        self.known.frames.pop()
        if len(self.lines) == before:
            self.line("pass")
        self.level -= 1

    def bind(self, axis: Atom, value: Value, wide: bool) -> None:
        """An axis has a value from here on. What was computed of another one is not known any more."""
        if axis in self.atoms and self.atoms[axis][0] != value:
            self.known.clear()
        if wide:
            self.wide_indices[axis] = None
        self.atoms[axis] = value, wide

    def name_value(self, name: str, value: Value) -> None:
        if name in self.values and self.values[name] != value:
            self.known.clear()
        self.values[name] = value

    def fixed(self, lanes: int) -> Block:
        """A block whose size is a number in the source."""
        return Block(str(lanes), Number.intern(lanes), lanes)

    def block(self, extent: Index, most: int) -> Block:
        """The block for an extent; the same for the same. One that a loop decides is the largest it may be."""
        known = all(isinstance(atom, Symbol) for atom in extent.atoms)
        highest = most if extent.high is None else min(most, extent.high)
        key = (extent if known else Number.intern(highest), most)
        if key not in self.blocks:
            self.blocks[key] = Block(self.fresh(f"BLOCK_{len(self.blocks)}"), *key)
        return self.blocks[key]

    def text(self) -> str:
        return "\n".join(_flat(self.lines))


def _flat(lines: Lines) -> Iterator[str]:
    for item in lines:
        if isinstance(item, str):
            yield item
        else:
            yield from _flat(item)
