"""Reductions in other forms, and in pieces: what a device may choose from before a program is grouped.

- A softmax statistic is the greatest value, then the sum of exponentials relative to it.
- A mean with squared deviations is a sum, then a sum. The second corrects what was rounded in the first. Of many
  elements it is made of those of pieces that are near in the caches.
- A long reduction with few results is done in pieces, and once more over what they came to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ferrite.ir import (
    STATES,
    ZERO,
    Axis,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Number,
    axis,
    cast,
    const,
    contiguous_strides,
    flat_extent,
    index_value,
    number,
    op,
    rewrite_indices,
)
from ferrite.ir.program import (
    Attention,
    Buffer,
    Compute,
    Destination,
    Mode,
    Operation,
    Program,
    Reduce,
    Scan,
    Sort,
    Store,
)
from ferrite.schedule.fusion.accesses import BufferTable, likely_points, upper_estimate
from ferrite.schedule.fusion.members import member_of

DIGITS_OF_A_COUNT = 16  # binary ones: of 65,536 equal numbers a sum in a type with so many more is exact
SPLIT_KINDS = ("sum", "prod", "amax", "amin", "any", "all", "xor")
EXTREME_OF = {"argmax": "amax", "argmin": "amin"}
# How stores combine that do what a reduction does.
STORE_MODES: dict[str, Mode] = {"sum": "add", "prod": "mul", "amax": "amax", "amin": "amin"}


class Preparation(ABC):
    """Rewrites the reductions of a program on devices of one type; `rewritten` gives the operations instead of one.

    `near_elements`: of a piece that is read twice, in f32. `max_split_results`: with more, those who share the work
    share the results, and need not share what is reduced. `min_split_elements`: in all; of fewer, nobody
    needs to share.
    """

    def __init__(
        self, program: Program, device: str, near_elements: int, max_split_results: int, min_split_elements: int
    ) -> None:
        self.device, self.near_elements = device, near_elements
        self.max_split_results, self.min_split_elements = max_split_results, min_split_elements
        self.buffer_table = BufferTable(program)
        self.buffers = dict(self.buffer_table.buffers)
        self.buffer_table.buffers = self.buffers

    def program(self, program: Program) -> Program:
        operations = [new for operation in program.operations for new in self.rewritten(operation)]
        return replace(program, buffers=tuple(self.buffers.values()), operations=tuple(operations))

    def rewritten(self, operation: Operation) -> Iterator[Operation]:
        if not isinstance(operation, Reduce) or not self.is_here(operation):
            yield operation
            return
        if operation.kind == "welford" and (cut := self.near_piece(operation)) is not None:
            yield from self.welford_in_pieces(operation, *cut)
            return
        for each in self.simpler(operation):
            if isinstance(each, Reduce):
                yield from self.split(each)
            else:
                yield each

    @abstractmethod
    def simpler(self, operation: Reduce) -> list[Compute | Reduce]:
        """A reduction in the form that the device likes best."""

    @abstractmethod
    def split(self, operation: Reduce) -> Iterator[Reduce]:
        """A reduction in pieces, where too few would share it."""

    def is_here(self, operation: Reduce | Scan | Sort | Attention) -> bool:
        names = [destination.buffer for destination in operation.destinations if destination is not None]
        return any(self.buffers[name].device.type == self.device for name in names)

    # --- kinds --------------------------------------------------------------------------------------------------------

    def softmax(self, operation: Reduce) -> list[Compute | Reduce]:
        (value,), (most, total) = operation.values, operation.destinations
        if most is None:
            most = self.made(operation, value.dtype)
        found: list[Compute | Reduce] = [replace(operation, kind="amax", destinations=(most,))]
        if total is not None:
            away = op("sub", value, cast(self.loaded(most), value.dtype))
            found.append(replace(operation, kind="sum", values=(op("exp", away),), destinations=(total,)))
        return found

    def welford(self, operation: Reduce) -> list[Compute | Reduce]:
        (value,), (mean, squares, count) = operation.values, operation.destinations
        how_many = count_value(flat_extent(item.extent for item in operation.reduced), value.dtype)
        total = self.made(operation, value.dtype)
        found: list[Compute | Reduce] = [replace(operation, kind="sum", destinations=(total,))]
        average = op("div", self.loaded(total), how_many)
        if squares is None or sums_exactly(value):
            is_exact = mean is not None and self.buffers[mean.buffer].dtype == value.dtype
            middle = mean if mean is not None and is_exact else self.made(operation, value.dtype)
            found.append(self.compute(operation, {middle: average}))
            if mean is not None and not is_exact:
                found.append(self.compute(operation, {mean: self.loaded(middle)}))
            if squares is not None:
                away = op("sub", value, self.loaded(middle))
                found.append(replace(operation, kind="sum", values=(op("mul", away, away),), destinations=(squares,)))
        else:
            rounded = self.made(operation, value.dtype)
            found.append(self.compute(operation, {rounded: average}))
            away = op("sub", value, self.loaded(rounded))
            found += self.corrected(operation, rounded, away, op("mul", away, away), how_many)
        if count is not None:
            found.append(self.compute(operation, {count: how_many}))
        return found

    def corrected(
        self,
        operation: Reduce,
        rounded: Destination,
        away: Expr,
        square: Expr,
        how_many: Expr,
        each: Expr | None = None,
    ) -> Iterator[Compute | Reduce]:
        """Mean and squares by deviations from a mean that was rounded: what their sum says it is off by is put right.
        So the numbers of a row that are all equal are their mean, and their deviations exactly zero, as in eager.
        `each`: how many numbers stand behind one deviation."""
        (value, *_), (mean, squares, _count) = operation.values, operation.destinations
        assert squares is not None
        rest, raw = self.made(operation, value.dtype), self.made(operation, value.dtype)
        yield replace(operation, kind="sum", values=(away,), destinations=(rest,))
        yield replace(operation, kind="sum", values=(square,), destinations=(raw,))
        off = op("div", self.loaded(rest), how_many)
        too_much = op("mul", self.loaded(rest), off)
        too_much = too_much if each is None else op("mul", too_much, each)
        # no more than the largest number: of an infinite sum of squares, nothing that is left is none
        too_much = op("minimum", too_much, const(torch.finfo(value.dtype).max, value.dtype))
        least = const(0.0, value.dtype)
        results = {squares: op("maximum", op("sub", self.loaded(raw), too_much), least)}
        if mean is not None:
            # where numbers are infinite, so is the mean, and deviations from it are none
            is_number = op("eq", off, off, dtype=torch.bool)
            off_by = op("where", is_number, off, const(0.0, value.dtype), dtype=value.dtype)
            results = {mean: op("add", self.loaded(rounded), off_by), **results}
        yield self.compute(operation, results)

    def welford_in_pieces(self, operation: Reduce, longest: Axis, size: int) -> Iterator[Compute | Reduce]:
        """The statistics of equal pieces, then of all: memory is read once, as a piece is in the cache when it is gone
        through again."""
        outer, inner, values = pieces_of(operation, longest, number(upper_estimate(longest.extent, 0) // size))
        reduced = tuple(inner if item is longest else item for item in operation.reduced)
        part = replace(operation, axes=(outer, *operation.axes), reduced=reduced, values=values)
        means, inside = (self.made(operation, values[0].dtype, (outer,)) for _ in range(2))
        yield from self.welford(replace(part, destinations=(means, inside, None)))
        yield from self.welford_of_pieces(operation, (outer,), means, inside)

    def welford_of_pieces(
        self, operation: Reduce, parts: tuple[Axis, ...], means: Destination, inside: Destination
    ) -> Iterator[Compute | Reduce]:
        """Statistics from those of pieces, one at every point of `parts`: the squares are those inside the pieces and
        those of the pieces' means."""
        (value,), (mean, squares, count) = operation.values, operation.destinations
        total, rounded = self.made(operation, value.dtype), self.made(operation, value.dtype)
        across_pieces = replace(operation, reduced=parts)
        yield replace(across_pieces, kind="sum", values=(self.loaded(means),), destinations=(total,))
        pieces = flat_extent(item.extent for item in parts)
        how_many = count_value(pieces, value.dtype)
        yield self.compute(operation, {rounded: op("div", self.loaded(total), how_many)})
        away = op("sub", self.loaded(means), self.loaded(rounded))
        all_of_it = flat_extent(item.extent for item in operation.reduced)
        if squares is None:
            assert mean is not None
            yield self.compute(operation, {mean: self.loaded(rounded)})
        else:
            each = count_value(all_of_it // pieces, value.dtype)
            both = op("add", self.loaded(inside), op("mul", op("mul", away, away), each))
            yield from self.corrected(across_pieces, rounded, away, both, how_many, each)
        if count is not None:
            yield self.compute(operation, {count: count_value(all_of_it, value.dtype)})

    def made(self, operation: Reduce, dtype: torch.dtype, extra: tuple[Axis, ...] = ()) -> Destination:
        """Memory for one result at every point that is not reduced."""
        return self.part(operation, dtype, (*extra, *operation.axes))

    def part(
        self, operation: Reduce | Scan | Sort | Attention, dtype: torch.dtype, axes: tuple[Axis, ...]
    ) -> Destination:
        """Memory for one value at every point of these axes, where the results of an operation are."""
        sizes = tuple(item.extent for item in axes)
        device = next(
            self.buffers[destination.buffer].device for destination in operation.destinations if destination is not None
        )
        name = f"part{len(self.buffers)}"
        while name in self.buffers:
            name += "_"
        self.buffers[name] = Buffer(name, dtype, sizes, contiguous_strides(sizes), ZERO, device)
        return Destination(name, tuple(axes))

    def loaded(self, destination: Destination) -> Expr:
        return Load.intern(destination.buffer, destination.coordinates, self.buffers[destination.buffer].dtype)

    def compute(self, operation: Reduce, results: Mapping[Destination, Expr]) -> Compute:
        stores = [
            Store(destination.buffer, destination.coordinates, cast(value, self.buffers[destination.buffer].dtype))
            for destination, value in results.items()
        ]
        return Compute(operation.axes, tuple(stores), operation.origin)

    def across(self, operation: Reduce) -> bool:
        """Whether results lie side by side, and not what is reduced: then threads share what is reduced, so that each
        goes through memory in its order."""
        return member_of(operation, self.buffer_table).favourite in operation.axes

    def state_type(self, operation: Reduce) -> torch.dtype:
        return torch.bool if operation.kind in ("any", "all") else operation.values[0].dtype

    def near_piece(self, operation: Reduce) -> tuple[Axis, int] | None:
        """The axis to cut, and how much of it a piece has that the nearest cache holds; None where threads need not
        share one result, or where results lie side by side."""
        many = likely_points(operation.reduced)
        if (
            many < self.min_split_elements
            or likely_points(operation.axes) >= self.max_split_results
            or self.across(operation)
        ):
            return None
        if not all(isinstance(item.extent, Number) for item in operation.reduced):
            return None
        longest = max(operation.reduced, key=lambda item: upper_estimate(item.extent, 0))
        length = upper_estimate(longest.extent, 0)
        most = min(self.near_elements * length // many, length // 4)
        size = next((size for size in range(most, 0, -1) if length % size == 0), 0)
        return (longest, size) if size * many // length >= self.near_elements // 8 else None


def pieces_of(operation: Reduce, longest: Axis, count: Index) -> tuple[Axis, Axis, tuple[Expr, ...]]:
    """An axis as so many equal pieces: the pieces, the places in one, and the values over both."""
    outer = axis(f"{longest.name}_piece", count)
    inner = axis(f"{longest.name}_rest", longest.extent // count)
    place: Index = outer * inner.extent + inner
    return outer, inner, tuple(rewrite_indices(item, {longest: place}) for item in operation.values)


def is_empty(operation: Reduce) -> bool:
    return any(item.extent is ZERO for item in operation.reduced)


def sums_exactly(value: Expr) -> bool:
    """Whether sums of equal numbers are not rounded, so that their mean is the number: they had fewer digits before."""
    return isinstance(value, Cast) and digits(value.arg.dtype) + DIGITS_OF_A_COUNT <= digits(value.dtype)


def digits(dtype: torch.dtype) -> int:
    """Of the numbers of a type, binary ones; 64 where it is not one of floats."""
    return 1 - round(math.log2(torch.finfo(dtype).eps)) if dtype.is_floating_point else 64


def count_value(many: Index, dtype: torch.dtype) -> Expr:
    return const(many.value, dtype) if isinstance(many, Number) else cast(index_value(many), dtype)


def neutral_value(kind: str, dtype: torch.dtype) -> Const:
    """What changes no state of a kind that it is combined with."""
    if kind in ("any", "all"):
        return const(kind == "all", dtype)
    begin = STATES[kind].begin((dtype,))[0]
    assert isinstance(begin, Const)
    return begin
