"""Products that torch writes where they are wanted: into their part of a concatenation.

    p = mm(a, b)                       allocate concat
    concat[:4] = p              =>     mm(a, b, out=concat[:4])
    concat[4:] = x                     concat[4:] = x

A product that is only copied, into a part of memory that is the program's own, needs no memory and no copy. Its part
must lie as BLAS writes it: rows side by side in steps of one. A device may want more of it: on a GPU, products that
write rows which begin anywhere take several times as long. The part is written earlier than before, so nothing but
other parts of the concatenation may be accessed until then. And all of the concatenation is there from its first
product on: where that raised the peak of the program, as a bucket of gradients would while most of what was saved is
still there, the first products are copied as before.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from ferrite.errors import NotScheduled
from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    FloorDiv,
    Index,
    Load,
    Mod,
    Symbol,
    axis,
    flat_extent,
    never_negative,
    rewrite_indices,
    substitute,
)
from ferrite.ir.program import Allocate, Buffer, Compute, Operation, Program, Ref, Store, Template, reads, writes
from ferrite.schedule.fusion.accesses import BufferTable, step_of
from ferrite.schedule.fusion.groups import apart
from ferrite.schedule.loops.axes import index_over
from ferrite.schedule.memory.liveness import last_uses_of
from ferrite.schedule.memory.peak import bytes_at, bytes_by_step

# Operators that compute the same, bit by bit, into memory that is given to them.
INTO = {f"aten.{name}.default": f"aten.{name}.out" for name in ("mm", "addmm", "bmm", "baddbmm")}
MAX_PARTS_SEARCHED = 64  # of a concatenation, for each product: a limit on compile time
MAX_PEAK_GROWTH = 1 / 64  # of the peak of the program, for copies that are not made


def with_out_products(program: Program, device: str, is_quick: Callable[[Buffer], bool] = lambda part: True) -> Program:
    """`device`: the type of those whose products these are. `is_quick`: whether one is as fast into a part."""
    work = _Destinations(program, device, is_quick)
    for place, operation in enumerate(program.operations):
        if isinstance(operation, Template) and operation.call.operator in INTO:
            work.take(place, operation)
    work.within_memory()
    return work.rewritten() if work.parts else program


class _Destinations:
    def __init__(self, program: Program, device: str, is_quick: Callable[[Buffer], bool]) -> None:
        self.program, self.device, self.is_quick = program, device, is_quick
        self.buffer_table = BufferTable(program)
        self.leaving = {self.storage(name) for name in program.outputs if isinstance(name, str)}
        self.viewed = {buffer.storage for buffer in program.buffers if buffer.storage != buffer.name}
        self.touching: dict[str, list[int]] = {}  # the places of the operations that touch a storage
        for place, operation in enumerate(program.operations):
            accesses = (*reads(operation), *writes(operation))
            for storage in dict.fromkeys(self.storage(access.buffer) for access in accesses):
                self.touching.setdefault(storage, []).append(place)
        self.parts: dict[str, Buffer] = {}  # products that are parts of another tensor
        self.products: dict[int, Template] = {}
        self.copies: dict[int, int] = {}  # by the places of products, those of the copies that are not made

    def storage(self, name: str) -> str:
        return self.buffer_table.buffers[name].storage

    def take(self, position: int, product: Template) -> None:
        """Make a product part of what it is copied to, where that can be."""
        (result,) = product.call.results
        if not isinstance(result, str) or self.is_seen(result):
            return
        if self.buffer_table.buffers[result].device.type != self.device:
            return
        users = self.touching[result]
        copy = self.program.operations[users[1]] if len(users) == 2 else None
        store = copied(copy, result)
        part = self.part(self.buffer_table.buffers[result], store) if store is not None else None
        if store is None or part is None or not self.is_quick(part) or self.is_touched(store, position, users[1]):
            return
        call = product.call
        into = replace(
            call,
            operator=INTO[str(call.operator)],
            kwargs=(*call.kwargs, ("out", Ref(result))),
            results=(None,),
            writes=(result,),
        )
        self.parts[result] = part
        self.products[position] = replace(product, call=into)
        self.copies[position] = users[1]

    def is_seen(self, result: str) -> bool:
        return self.buffer_table.buffers[result].kind != "owned" or result in self.leaving or result in self.viewed

    def is_touched(self, store: Store, first: int, last: int) -> bool:
        """Whether anything but other parts of the tensor is touched from the product on, before it is copied."""
        mine = self.buffer_table.access(store.buffer, store.coordinates, True)
        places = self.touching[mine.storage]
        between = places[bisect_left(places, first) : bisect_left(places, last)]
        return len(between) > MAX_PARTS_SEARCHED or not all(
            isinstance(operation := self.program.operations[place], Compute)
            and all(
                access.writes and access.mode == "set" and apart(access, mine)
                for access in self.buffer_table.accesses(operation)
                if access.storage == mine.storage
            )
            for place in between
        )

    def part(self, product: Buffer, store: Store) -> Buffer | None:
        """The product as a view of what it is copied to, where BLAS can write it there."""
        target = self.buffer_table.buffers[store.buffer]
        if target.kind != "owned" or flat_extent(target.sizes) is flat_extent(product.sizes):
            return None
        assert isinstance(store.value, Load)
        axes = store.value.coordinates
        extents = [item.extent if isinstance(item, Axis) else ONE for item in axes]
        if any(extent is not size for extent, size in zip(extents, product.sizes, strict=True)):
            return None  # part of the product
        place = self.buffer_table.place(store.buffer, store.coordinates)
        strides = [
            step_of(place, item) if isinstance(item, Axis) else own
            for item, own in zip(axes, product.strides, strict=True)
        ]
        steps = [step for step in strides if step is not None]
        if len(steps) < len(axes) or steps[-1] is not ONE or not never_negative(steps[-2] - product.sizes[-1]):
            return None
        offset = substitute(place, {item: ZERO for item in axes if isinstance(item, Axis)})
        if not all(isinstance(atom, Symbol) for index in (offset, *steps) for atom in index.atoms):
            return None
        return replace(product, strides=tuple(steps), offset=offset, kind="view", base=target.name)

    def within_memory(self) -> None:
        """Give up those products of a concatenation, the first ones, for which it would be there while the program
        holds most."""
        groups: dict[str | None, list[int]] = {}
        for position, product in self.products.items():
            groups.setdefault(self.parts[product.call.writes[0]].base, []).append(position)
        program = self.program
        last_uses = last_uses_of(program, program.operations, self.buffer_table)
        given = (buffer for buffer in program.buffers if buffer.kind == "donated")
        try:
            before = sum(bytes_at(buffer, {}) for buffer in given)
            change = bytes_by_step(program, program.operations, last_uses, lambda buffer: bytes_at(buffer, {}))
        except NotScheduled:  # sizes that vary
            return
        held = [before + each for each in change]
        limit = max(held, default=0) * (1 + MAX_PEAK_GROWTH)
        for concat, positions in groups.items():
            if concat is not None:
                self.given_up(concat, positions, held, limit)

    def given_up(self, concat: str, positions: Sequence[int], held: list[int], limit: float) -> None:
        """`positions`: of the products of a concatenation. `held`: bytes at each place, which changes with it."""

        def size(name: str) -> int:
            return bytes_at(self.buffer_table.buffers[name], {})

        first, end = positions[0], self.touching[concat][0]  # from where on it may be there, and is there in any case
        total, own = size(concat), {place: size(self.products[place].call.writes[0]) for place in positions}
        # What is held if all are written in place. For each that is not, its own bytes are held beside.
        made = list(itertools.accumulate(own.get(place, 0) for place in range(first, end)))
        least = [held[first + place] + total - size for place, size in enumerate(made)]
        most_from_here = list(itertools.accumulate(reversed(least), max))[::-1]
        kept = total_before = 0
        while kept < len(positions) and positions[kept] < end:
            if most_from_here[positions[kept] - first] + total_before <= limit:
                break
            total_before += own[positions[kept]]
            kept += 1
        for place in positions[:kept]:
            del self.parts[self.products.pop(place).call.writes[0]], self.copies[place]
        for place in range(positions[kept] if kept < len(positions) else end, end):
            held[place] = least[place - first] + total_before

    def rewritten(self) -> Program:
        operations: list[Operation] = []
        allocated: set[str | None] = set()
        copies = set(self.copies.values())
        for place, operation in enumerate(self.program.operations):
            if place in copies:
                continue
            if (product := self.products.get(place)) is not None:
                concat = self.parts[product.call.writes[0]].base
                if concat is not None and concat not in allocated:
                    operations.append(Allocate(concat, product.origin))
                    allocated.add(concat)
            operations.append(product or operation)
        buffers = tuple(self.parts.get(buffer.name, buffer) for buffer in self.program.buffers)
        return replace(self.program, buffers=buffers, operations=tuple(operations))


def copied(operation: Operation | None, name: str) -> Store | None:
    """The store of an operation that copies elements of a buffer, each once, and does nothing else."""
    if not isinstance(operation, Compute) or len(operation.stores) != 1:
        return None
    (store,) = operation.stores
    if store.mode != "set" or not isinstance(store.value, Load) or store.value.buffer != name:
        return None
    axes = set(operation.axes)
    for item in operation.axes:
        if (size := divisor(item, store.value.coordinates)) is not None:
            outer, inner = axis(f"{item.name}_outer", item.extent // size), axis(f"{item.name}_inner", size)
            store = over(store, {item: outer * size + inner})
            axes = axes - {item} | {outer, inner}
    assert isinstance(store.value, Load)
    moving = [item for item in store.value.coordinates if item is not ZERO]
    return store if len(set(moving)) == len(moving) and set(moving) == axes else None


def divisor(loop_axis: Axis, coordinates: Sequence[Index]) -> Index | None:
    """Where coordinates are `item // size` and `item % size`: that size, if it divides the extent."""
    found = {index.bottom for index in coordinates if isinstance(index, FloorDiv | Mod) and index.top is loop_axis}
    size = found.pop() if len(found) == 1 else None
    return size if size is not None and loop_axis.extent % size is ZERO else None


def over(store: Store, new: dict[Axis, Index]) -> Store:
    coordinates = tuple(index_over(index, new) for index in store.coordinates)
    return replace(store, coordinates=coordinates, value=rewrite_indices(store.value, new))
