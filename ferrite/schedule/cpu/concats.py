"""Readers of concatenations, split at the joints: where one part ends and the next begins.

    concat[:4] = a; concat[4:] = b              concat[:4] = a; y[:4] = concat[:4] + 1
    y[:8] = concat[:8] + 1               =>     concat[4:] = b; y[4:] = concat[4:] + 1

Each part of the reader then has the shape of the part it reads. The parts of the concatenation become tensors of their
own, and what makes a part and what reads it become one kernel: the concatenation is never in memory. What the reader
writes is a concatenation itself, so that its own readers follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Index,
    Load,
    Symbol,
    axis,
    never_negative,
    nodes_of,
    rewrite_indices,
    rewrite_loads,
)
from ferrite.ir.program import Buffer, Compute, Operation, Program, Store, reads, writes
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.loops.axes import index_over

MAX_PARTS = 8  # of a concatenation whose readers are split: code grows with each
UNKNOWN_STRIDE = 1 << 30  # elements: larger than any that is known
Joints = tuple[Index, ...]  # where the parts begin


def split_readers(program: Program) -> Program:
    work = _Concats(program)
    operations = [part for operation in program.operations for part in work.split_reader(operation)]
    if len(operations) == len(program.operations):
        return program
    apart = _Apart(work, operations)
    operations = [apart.renamed(operation) for operation in operations]
    return replace(program, buffers=(*program.buffers, *apart.buffers), operations=tuple(operations))


class _Concats:
    def __init__(self, program: Program) -> None:
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        leaving = {self.buffers[name].storage for name in program.outputs if isinstance(name, str)}
        viewed = {buffer.storage for buffer in program.buffers if buffer.storage != buffer.name}
        # memory that can disappear: nothing but loops sees it
        self.hidden = {buffer.name for buffer in program.buffers if buffer.kind == "owned"} - leaving - viewed
        self.writers: dict[str, list[Operation]] = {}
        self.readers: dict[str, list[Operation]] = {}
        for operation in program.operations:
            for access in reads(operation):
                self.readers.setdefault(access.buffer, []).append(operation)

        self.cut: dict[str, tuple[int, Joints]] = {}  # buffers whose readers are split

    def split_reader(self, operation: Operation) -> list[Operation]:
        parts: list[Operation] = [operation]
        if isinstance(operation, Compute):
            for name, item, (dimension, joints) in self.cuts(operation):
                parts = list(split(operation, item, joints))
                self.cut[name] = dimension, joints
                break
        for part in parts:
            for name in {access.buffer for access in writes(part)}:
                self.writers.setdefault(name, []).append(part)
        return parts

    def cuts(self, operation: Compute) -> Iterator[tuple[str, Axis, tuple[int, Joints]]]:
        """What a reader reads in parts, with which axis, and where to cut that."""
        for name in dict.fromkeys(access.buffer for access in reads(operation)):
            concat_of = self.concat_of(name) if name in self.hidden else None
            if concat_of is None:
                continue
            along = [axis_at(each, name, concat_of[0]) for each in self.readers[name]]
            mine = axis_at(operation, name, concat_of[0])
            if mine is not None and None not in along and joints_before(concat_of[1], mine.extent) is not None:
                yield name, mine, concat_of

    def concat_of(self, name: str) -> tuple[int, Joints] | None:
        """The dimension along which a buffer is written in parts, and where they begin."""
        buffer, parts = self.buffers[name], self.writers.get(name, [])
        if not 2 <= len(parts) <= MAX_PARTS:
            return None
        found: dict[Index, tuple[int, Index]] = {}  # by where a part begins: its dimension, and where it ends
        for part in parts:
            stores = [store for store in part.stores if store.buffer == name] if isinstance(part, Compute) else []
            if len(stores) != 1 or stores[0].mode != "set":
                return None
            place = place_of(stores[0].coordinates, buffer.sizes)
            if place is None or place[1] in found:
                return None
            dimension, start, extent = place
            found[start] = dimension, start + extent
        joints: list[Index] = []
        end: Index = ZERO
        while end in found:
            along, following = found.pop(end)
            if along != dimension or following is end:
                return None
            joints.append(end)
            end = following
        return (dimension, tuple(joints)) if not found and end is buffer.sizes[dimension] else None


def place_of(coordinates: tuple[Index, ...], sizes: tuple[Index, ...]) -> tuple[int, Index, Index] | None:
    """Of what is written whole in all dimensions but one: that one, where the part begins there, and how long it is."""
    found: tuple[int, Index, Index] | None = None
    for dimension, (at, size) in enumerate(zip(coordinates, sizes, strict=True)):
        if isinstance(at, Axis) and at.extent is size:
            continue
        moving = [atom for atom in at.atoms if not isinstance(atom, Symbol)]
        item = moving[0] if len(moving) == 1 else None
        if found or not isinstance(item, Axis) or item in (start := at - item).atoms:
            return None
        found = dimension, start, item.extent
    return found


def axis_at(operation: Operation, name: str, dimension: int) -> Axis | None:
    """The axis with which an operation goes through a dimension of a buffer, everywhere where it reads that."""
    if not isinstance(operation, Compute) or any(store.mode != "set" for store in operation.stores):
        return None
    loads = {
        item.coordinates[dimension]
        for item in nodes_of(*(store.value for store in operation.stores))
        if isinstance(item, Load) and item.buffer == name
    }
    item = next(iter(loads)) if len(loads) == 1 else None
    return item if isinstance(item, Axis) and item in operation.axes else None


def joints_before(joints: Joints, end: Index) -> Joints | None:
    """The joints that a reader of the first `end` elements goes across: of 0, 4, 9 one of the first 6 has 0 and 4. None
    where sizes that are known only later decide which ones."""
    inside = tuple(start for start in joints if start is ZERO or not never_negative(start - end))
    return inside if all(never_negative(end - start) for start in inside) else None


def split(operation: Compute, loop_axis: Axis, joints: Joints) -> Iterator[Compute]:
    """An operation in parts, none of which reads across a joint; it ends where its own axis does."""
    inside = joints_before(joints, loop_axis.extent)
    assert inside is not None
    for start, end in zip(inside, (*inside[1:], loop_axis.extent), strict=True):
        part = axis(loop_axis.name, end - start)
        new: dict[Axis, Index] = {loop_axis: part + start}
        yield replace(
            operation,
            axes=tuple(part if each is loop_axis else each for each in operation.axes),
            stores=tuple(
                replace(
                    store,
                    coordinates=tuple(index_over(at, new) for at in store.coordinates),
                    value=rewrite_indices(store.value, new),
                )
                for store in operation.stores
            ),
        )


class _Apart:
    """Gives the parts of concatenations memory of their own, where nothing accesses more than one of them."""

    def __init__(self, concats: _Concats, operations: list[Operation]) -> None:
        self.cut = dict(concats.cut)
        self.sizes = {name: concats.buffers[name].sizes[dimension] for name, (dimension, _) in self.cut.items()}
        for operation in operations:
            for access in (*reads(operation), *writes(operation)):
                if access.buffer in self.cut and self.part(access.buffer, access.coordinates) is None:
                    del self.cut[access.buffer]
        self.buffers = [
            part_of(concats.buffers[name], dimension, joints, number)
            for name, (dimension, joints) in self.cut.items()
            for number in range(len(joints))
        ]

    def part(self, name: str, coordinates: tuple[Index, ...] | None) -> int | None:
        """The number of the part that coordinates are in."""
        dimension, joints = self.cut[name]
        at = coordinates[dimension] if coordinates is not None else None
        if at is None:
            return None
        ends = (*joints[1:], self.sizes[name])
        for number, (start, end) in enumerate(zip(joints, ends, strict=True)):
            if never_negative(at - start) and never_negative(end - 1 - at):
                return number
        return None

    def moved(self, name: str, coordinates: tuple[Index, ...]) -> tuple[str, tuple[Index, ...]]:
        dimension, joints = self.cut[name]
        number = self.part(name, coordinates)
        assert number is not None
        at = (*coordinates[:dimension], coordinates[dimension] - joints[number], *coordinates[dimension + 1 :])
        return part_name(name, number), at

    def renamed(self, operation: Operation) -> Operation:
        if not isinstance(operation, Compute):
            return operation
        return replace(operation, stores=tuple(map(self.store, operation.stores)))

    def store(self, store: Store) -> Store:
        value = rewrite_loads(store.value, self.load)
        if store.buffer not in self.cut:
            return replace(store, value=value)
        name, at = self.moved(store.buffer, store.coordinates)
        return Store(name, at, value, store.mode)

    def load(self, load: Load) -> Load:
        return Load.intern(*self.moved(load.buffer, load.coordinates), load.dtype) if load.buffer in self.cut else load


def part_name(name: str, number: int) -> str:
    return f"{name}_part{number}"


def part_of(buffer: Buffer, dimension: int, joints: Joints, number: int) -> Buffer:
    """Memory for one part, laid out as the whole is."""
    size = buffer.sizes[dimension]
    end = joints[number + 1] if number + 1 < len(joints) else size
    sizes = (*buffer.sizes[:dimension], end - joints[number], *buffer.sizes[dimension + 1 :])
    order = sorted(range(len(sizes)), key=lambda place: (likely(buffer.strides[place], UNKNOWN_STRIDE), -place))
    strides: list[Index] = [ONE] * len(sizes)
    step: Index = ONE
    for place in order:
        strides[place] = step
        step = step * sizes[place]
    return replace(buffer, name=part_name(buffer.name, number), sizes=sizes, strides=tuple(strides))
