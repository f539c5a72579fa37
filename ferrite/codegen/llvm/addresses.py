"""Where the elements of a load or store lie: at one address, in a row, or each somewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from ferrite.codegen.llvm.emission import Emission, Memory
from ferrite.codegen.llvm.indices import Indices, LaneIndex, factor_of
from ferrite.ir import ONE, ZERO, Axis, Index, Number, Sum, data_atoms, number

VECTORS_OF_STEPS = (2, 4, 8)  # how many steps of a loop that is written out are a vector that machines have
SHORT_STEPS = (2, 3)  # elements that are near enough to be picked out of whole vectors


@dataclass(frozen=True)
class Address:
    """`one`: all lanes at one address; `row`: side by side; `back`: the same from last to first, the address is that of
    the last lane; `step`: every so many elements, the address is that of the first lane; `spread`: an address for every
    lane."""

    kind: OneOf["one", "row", "back", "step", "spread"]
    pointers: tuple[str, ...]
    step: int = 1


class Addresses:
    def __init__(self, emission: Emission, indices: Indices) -> None:
        self.e, self.indices = emission, indices

    def of(self, memory: Memory, coordinates: Sequence[Index], element: str, width: int = 1) -> list[Address]:
        """The place in every copy; a single one where they agree. What is loaded there has so many elements."""
        flat = flat_index(memory, coordinates)
        copies = self.indices.copies(flat)
        shifts = self.constant_shifts(flat) if copies > 1 else None
        axis = self.moving_axis(flat)
        factor = ZERO if axis is None else self.factor(flat, axis)
        made = []
        for replica in range(copies):
            if factor is None or self.moves_by_data(flat):
                made.append(self.spread_by_vector(memory, flat, replica, element))
                continue
            at = 0 if shifts is not None else replica
            base = self.pointer(memory, flat, at, element, shifts[replica] if shifts else 0)
            made.append(self.moved(base, axis, factor, at, element, width))
        return made

    def moving_axis(self, flat: Index) -> Axis | None:
        """The vector axis, where the place depends on it."""
        if self.e.lanes == 1:
            return None
        return next((atom for atom in flat.atoms if isinstance(atom, Axis) and self.e.axes[atom].lanes > 1), None)

    def steps_in_a_row(self, flat: Index) -> Axis | None:
        """The axis of a loop that is written out, where its steps go through elements side by side, all lanes alike."""
        steps = next((atom for atom in flat.atoms if isinstance(atom, Axis) and self.is_written_out(atom)), None)
        if steps is None or data_atoms(flat) or self.moving_axis(flat) is not None:
            return None
        return steps if factor_of(flat, steps) is ONE else None

    def is_written_out(self, axis: Axis) -> bool:
        return self.e.axes[axis].written_out in VECTORS_OF_STEPS

    def factor(self, flat: Index, axis: Axis) -> Index | None:
        value = self.e.axes[axis]
        return factor_of(flat, axis, value.aligned, value.lanes)

    def moves_by_data(self, flat: Index) -> bool:
        return any(self.indices.data(atom).lanes > 1 for atom in data_atoms(flat))

    def constant_shifts(self, flat: Index) -> list[int] | None:
        """How far the copies are from the first one, where that is known now."""
        total = [0] * self.e.replicas
        if any(len(self.indices.data(atom).parts) > 1 for atom in data_atoms(flat)):
            return None
        for atom in flat.atoms:
            if not isinstance(atom, Axis) or len(self.e.axes[atom].shifts) == 1:
                continue
            factor = factor_of(flat, atom)
            if not isinstance(factor, Number):
                return None
            shifts = self.e.axes[atom].shifts
            for replica in range(self.e.replicas):
                total[replica] += factor.value * shifts[replica * len(shifts) // self.e.replicas]
        return [shift - total[0] for shift in total]

    def moved(self, base: str, axis: Axis | None, factor: Index, replica: int, element: str, width: int = 1) -> Address:
        if axis is None or factor is ZERO:
            return Address("one", (base,))
        offsets, plain = self.e.axes[axis].offsets, not self.e.axes[axis].repeats
        if factor is number(width) and plain:
            return Address("row", (base,))
        if width == 1 and factor is number(-1) and plain:
            return Address("back", (self.beyond(base, LaneIndex(str(1 - len(offsets))), element),))
        if isinstance(factor, Number) and factor.value in SHORT_STEPS and plain and width == 1:
            return Address("step", (base,), factor.value)
        step = self.indices.at(factor, replica, "i64", lane_zero=True)
        places = [self.indices.multiply(step, LaneIndex(offset), "i64") for offset in offsets]
        return Address("spread", tuple(self.beyond(base, place, element) for place in places))

    def pointer(self, memory: Memory, flat: Index, replica: int, element: str, shift: int) -> str:
        """The address of the first lane. Each part of the sum is added where it is known."""
        terms, constant = (flat.terms, flat.constant) if isinstance(flat, Sum) else (((flat, 1),), 0)
        if isinstance(flat, Number):
            terms, constant = (), flat.value
        parts = []
        for item, factor in terms:
            found = self.indices.at(item, replica, "i64", lane_zero=True)
            parts.append(self.indices.multiply(found, LaneIndex(str(factor)), "i64"))
        return self.summed(memory, parts, constant + shift, element)

    def summed(self, memory: Memory, parts: list[LaneIndex], constant: int, element: str) -> str:
        pointer = self.e.here(memory.pointer, "ptr")
        ranked = sorted(parts, key=lambda part: self.indices.rank(part.name))
        for _, group in itertools.groupby(ranked, key=lambda part: self.indices.rank(part.name)):
            total = LaneIndex("0")
            for part in group:
                total = self.indices.add(total, part, "i64")
            pointer = self.beyond(pointer, total, element)
        return self.beyond(pointer, LaneIndex(str(constant)), element)

    def beyond(self, pointer: str, count: LaneIndex, element: str) -> str:
        if count.name == "0":
            return pointer
        return self.e.op(f"getelementptr {element}, ptr {pointer}, i64 {count.name}", pointer, count.name)

    def spread_by_vector(self, memory: Memory, flat: Index, replica: int, element: str) -> Address:
        """Lanes that lie anywhere: the parts that agree make the base, the others are taken out of a vector."""
        terms, constant = (flat.terms, flat.constant) if isinstance(flat, Sum) else (((flat, 1),), 0)
        same, moving = [], LaneIndex("0")
        for item, factor in terms:
            found = self.indices.at(item, replica, "i64")
            found = self.indices.multiply(found, LaneIndex(str(factor)), "i64")
            if found.lanes == 1:
                same.append(found)
            else:
                moving = self.indices.add(moving, found, "i64")
        base = self.summed(memory, same, constant, element)
        lanes = self.e.lanes
        places = [LaneIndex(self.e.lane(moving.name, "i64", lanes, lane)) for lane in range(lanes)]
        return Address("spread", tuple(self.beyond(base, place, element) for place in places))


def flat_index(memory: Memory, coordinates: Sequence[Index]) -> Index:
    flat: Index = ZERO
    for coordinate, stride in zip(coordinates, memory.strides, strict=True):
        flat = flat + coordinate * stride
    return flat
