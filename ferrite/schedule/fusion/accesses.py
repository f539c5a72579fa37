"""Which memory an operation accesses: one access per load and store, as a place in a storage.

Places are flat: elements from where the storage of the buffer begins, strides and offsets multiplied out. Two
operations depend on each other where they touch one storage and one of them writes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ferrite.errors import NotScheduled
from ferrite.ir import (
    ONE,
    ZERO,
    Atom,
    Axis,
    Data,
    Index,
    Number,
    Product,
    Sum,
    Symbol,
    add,
    evaluate,
    may_overlap,
    number,
    substitute,
    symbols_in,
)
from ferrite.ir.program import Buffer, LoopOperation, Program, destinations_of, loads, reads, stores_of


@dataclass(frozen=True)
class MemoryAccess:
    """`layout`: the buffer itself, which says where its elements lie."""

    buffer: str
    storage: str
    coordinates: tuple[Index, ...]
    writes: bool
    mode: str
    layout: Buffer = field(compare=False, repr=False)

    @cached_property
    def place(self) -> Index:
        """The element, counted from where the storage begins. Most accesses are never asked for it."""
        return place_in(self.layout, self.coordinates)


class BufferTable:
    """Where the elements of a program's buffers lie."""

    def __init__(self, program: Program) -> None:
        self.buffers: Mapping[str, Buffer] = {buffer.name: buffer for buffer in program.buffers}
        self._layout_symbols: dict[str, frozenset[Symbol]] = {}
        self._program = program

    @cached_property
    def readers(self) -> Mapping[str, int]:
        """How many operations read each storage."""
        found: Counter[str] = Counter()
        for operation in self._program.operations:
            found.update({self.buffers[access.buffer].storage for access in reads(operation)})
        return found

    def place(self, name: str, coordinates: Iterable[Index]) -> Index:
        return place_in(self.buffers[name], coordinates)

    def access(self, name: str, coordinates: tuple[Index, ...], writes: bool, mode: str = "set") -> MemoryAccess:
        buffer = self.buffers[name]
        return MemoryAccess(name, buffer.storage, coordinates, writes, mode, buffer)

    def accesses(self, operation: LoopOperation) -> tuple[MemoryAccess, ...]:
        """Loads, then stores, each place once."""
        found: dict[MemoryAccess, None] = {}
        for load in loads(operation):
            found[self.access(load.buffer, load.coordinates, False)] = None
        stored = stores_of(operation)
        for store in stored:
            found[self.access(store.buffer, store.coordinates, True, store.mode)] = None
        if not stored:
            for target in destinations_of(operation):
                found[self.access(target.buffer, target.coordinates, True)] = None
        return tuple(found)

    def layout_symbols(self, name: str) -> frozenset[Symbol]:
        """The symbols that say where the elements of a buffer lie, and how much memory there is around them."""
        if name not in self._layout_symbols:
            around = {buffer.name: buffer for buffer in (self.buffers[name], self.buffers[self.buffers[name].storage])}
            indices = [index for each in around.values() for index in (*each.sizes, *each.strides, each.offset)]
            self._layout_symbols[name] = frozenset(symbol for index in indices for symbol in symbols_in(index))
        return self._layout_symbols[name]

    def dtype(self, storage: str) -> torch.dtype:
        return self.buffers[storage].dtype


def place_in(buffer: Buffer, coordinates: Iterable[Index]) -> Index:
    parts: list[tuple[Index, int]] = [(buffer.offset, 1)] if buffer.kind == "view" else []
    for coordinate, stride in zip(coordinates, buffer.strides, strict=True):
        parts.append((coordinate, stride.value) if isinstance(stride, Number) else (coordinate * stride, 1))
    return add(parts)


# --- one place --------------------------------------------------------------------------------------------------------


def step_of(index: Index, axis: Axis) -> Index | None:
    """By how much a place moves when an axis takes one step; None where that depends on where it stands."""
    if index is axis:
        return ONE
    if isinstance(index, Sum):
        known = 0
        for item, factor in index.terms:
            if item is axis:
                known = factor
            elif not isinstance(item, Axis | Symbol) and (axis in item.atoms or reads_axis(item, axis)):
                break
        else:
            return number(known)
    if reads_axis(index, axis):
        return None
    if axis not in index.atoms:
        return ZERO
    step = substitute(index, {axis: axis + 1}) - index
    return None if axis in step.atoms else step


def reads_axis(index: Index, axis: Axis) -> bool:
    """Whether a place depends on an axis through what it reads from memory."""
    return any(isinstance(atom, Data) and axis in atom.value.atoms for atom in index.atoms)


def axes_in(index: Index) -> frozenset[Axis]:
    """The axes a place depends on, through data too."""
    found = {atom for atom in index.atoms if isinstance(atom, Axis)}
    for atom in index.atoms:
        if isinstance(atom, Data):
            found |= {inner for inner in atom.value.atoms if isinstance(inner, Axis)}
    return frozenset(found)


UNKNOWN_EXTENT = 64  # what an extent that nothing bounds is taken for, where a decision needs a number


def upper_estimate(index: Index, otherwise: int) -> int:
    """No less than a size, as far as anybody knows: itself, or its upper bound, but at most `otherwise`.

    With `s0` from 2 to 100, `upper_estimate(s0, 64)` is 64; of a size without a bound it is `otherwise`.
    """
    if isinstance(index, Number):
        return index.value
    return otherwise if index.high is None else min(index.high, otherwise)


def likely(index: Index, otherwise: int = UNKNOWN_EXTENT) -> int:
    """A number for a size, where a decision needs one that need not be right: itself, what was seen, or a guess."""
    if isinstance(index, Number):
        return index.value
    try:
        return int(evaluate(index, likely_of_atom))
    except NotScheduled:
        return upper_estimate(index, otherwise)


def is_one(item: Axis) -> bool:
    """Whether an axis has one point."""
    return item.extent is ONE


def likely_points(axes: Iterable[Axis]) -> int:
    """How many points axes have together, likely."""
    return math.prod(likely(item.extent) for item in axes)


def likely_of_atom(atom: Atom) -> int:
    if isinstance(atom, Symbol) and atom.likely is not None:
        return atom.likely
    raise NotScheduled(str(atom))


# --- two accesses of one storage --------------------------------------------------------------------------------------


def separated(first: MemoryAccess, second: MemoryAccess, rows: Iterable[Axis]) -> bool:
    """Whether two accesses meet in one row at most: at different values of the rows they are at different elements."""
    wanted = {row for row in rows if not is_one(row)}
    if not wanted:
        return True
    if first.buffer == second.buffer and elements_are_apart(first.layout):
        pairs = zip(first.coordinates, second.coordinates, strict=True)
        fixed: set[Axis] = set()
        for left, right in pairs:
            fixed |= decided_rows(left, right, wanted)
        if wanted <= fixed:
            return True
    return first.place is second.place and mixed_radix(first.place, wanted)


def elements_are_apart(buffer: Buffer) -> bool:
    """Whether no two elements of a buffer share a place. What is not a number is taken for a layout that is dense."""
    if buffer.kind != "view":
        return True
    if any(isinstance(stride, Number) and stride.value <= 0 for stride in buffer.strides):
        return False
    dims = zip(buffer.sizes, buffer.strides, strict=True)
    return not may_overlap(
        (size.value, stride.value) for size, stride in dims if isinstance(size, Number) and isinstance(stride, Number)
    )


def decided_rows(left: Index, right: Index, rows: set[Axis]) -> set[Axis]:
    """The rows that must be the same where two coordinates are: the only ones of both, or those whose steps are longer
    than all that is beside them, as in `64*i + j` and `64*i + k` with j and k below 64."""
    if left is right and (row := only_row(left, rows)) is not None:
        return {row}
    if not isinstance(left, Sum) or not isinstance(right, Sum):
        return set()
    sides = [row_steps(left, rows), row_steps(right, rows)]
    if sides[0] is None or sides[1] is None or sides[0][0] != sides[1][0] or not sides[0][0]:
        return set()
    (steps, low, high), (_, other_low, other_high) = sides[0], sides[1]
    spread = max(high, other_high) - min(low, other_low)
    for row in sorted(steps, key=lambda row: abs(steps[row])):
        if abs(steps[row]) <= spread or row.high is None:
            return set()
        spread += abs(steps[row]) * row.high
    return set(steps)


def row_steps(coordinate: Sum, rows: set[Axis]) -> tuple[dict[Axis, int], int, int] | None:
    """The factors of rows in a coordinate, and between which numbers all the rest of it is."""
    steps: dict[Axis, int] = {}
    low = high = coordinate.constant
    for item, factor in coordinate.terms:
        if isinstance(item, Axis) and item in rows:
            steps[item] = factor
        elif item.low is None or item.high is None or not axes_in(item).isdisjoint(rows):
            return None
        else:
            ends = (factor * item.low, factor * item.high)
            low, high = low + min(ends), high + max(ends)
    return steps, low, high


def only_row(coordinate: Index, rows: set[Axis]) -> Axis | None:
    """The row that alone decides a coordinate, one to one. Sizes beside it only say where it begins."""
    if isinstance(coordinate, Axis):
        return coordinate if coordinate in rows else None
    if isinstance(coordinate, Sum):
        moving = [item for item, _ in coordinate.terms if not all(isinstance(atom, Symbol) for atom in item.atoms)]
        if len(moving) == 1 and isinstance(moving[0], Axis) and moving[0] in rows:
            return moving[0]
    return None


def mixed_radix(index: Index, rows: set[Axis]) -> bool:
    """Whether rows decide parts of a place that do not overlap: 64*i + j with j below 64 is at another i elsewhere,
    however large i may be."""
    terms = dict(index.terms) if isinstance(index, Sum) else {index: 1}
    factors: list[tuple[int, float]] = []  # step, how many
    spread = 0.0
    for item, factor in terms.items():
        if isinstance(item, Axis) and item in rows:
            factors.append((abs(factor), math.inf if item.extent.high is None else item.extent.high))
        elif item.low is None or item.high is None or not axes_in(item).isdisjoint(rows):
            return False
        else:
            spread += abs(factor) * (item.high - item.low)
    if len(factors) < len(rows):
        return False
    for step, count in sorted(factors):
        if step <= spread:
            return False
        spread += step * (count - 1) if count > 1 else 0
    return True


# --- coordinates of two accesses --------------------------------------------------------------------------------------


def counterparts(left: Index, right: Index) -> Iterator[tuple[Axis, Axis]]:
    """Axes that do the same in two coordinates: `128*i + j + 1` and `128*k + l + 1` have i and k, j and l, as `n*i + j`
    and `n*k + l` have."""
    (constant, terms), (other_constant, others) = constant_and_terms(left), constant_and_terms(right)
    if constant != other_constant or terms.keys() != others.keys():
        return
    for factor, item in terms.items():
        other = others[factor]
        if isinstance(item, Axis) and isinstance(other, Axis):
            yield item, other


def constant_and_terms(coordinate: Index) -> tuple[int, dict[tuple[int, Index], Index]]:
    """The terms by their factors, of which sizes are part; nothing where two have the same."""
    if not isinstance(coordinate, Sum):
        return 0, {(1, ONE): coordinate}
    by_factor: dict[tuple[int, Index], Index] = {}
    for item, factor in coordinate.terms:
        sizes, rest = without_sizes(item)
        by_factor[factor, sizes] = rest
    return coordinate.constant, by_factor if len(by_factor) == len(coordinate.terms) else {}


def without_sizes(item: Index) -> tuple[Index, Index]:
    """A product of one axis and sizes as these and the axis."""
    if isinstance(item, Product):
        axes = [each for each in item.factors if isinstance(each, Axis)]
        sizes = [each for each in item.factors if not isinstance(each, Axis)]
        if len(axes) == 1 and all(isinstance(atom, Symbol) for each in sizes for atom in each.atoms):
            return math.prod(sizes, start=ONE), axes[0]
    return ONE, item
