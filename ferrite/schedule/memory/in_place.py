"""Memory that is taken over: a kernel may write where something lies that it reads for the last time.

That saves memory, and time: lines of the cache that were just read are written again. Both are then one pointer of the
kernel, since different pointers do not overlap where one is written. It is allowed where every element of the old is
read before the same element of the new is written: at the same point, or in an earlier loop of the same row. Rows,
which threads share, must not meet at all.

Nobody else may look at the old memory: it is the program's own, or was given away to it; it does not leave the program;
and it was given only to kernels and to operators whose results are new memory. Others may return what they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferrite.ir import ONE, ZERO, Axis, Index, Number
from ferrite.ir.program import (
    Allocate,
    Bind,
    Buffer,
    Compute,
    Item,
    Operation,
    Program,
    Reduce,
    Scan,
    Sort,
    Template,
    reads,
    writes,
)
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, is_one, mixed_radix, separated
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.fusion.nests import Nest, nests_of

# What keeps nothing of what it is given, and returns none of it.
PASSING_NOTHING_ON = (Group, Compute, Reduce, Scan, Sort, Template, Allocate, Bind, Item)


class InPlaceReuse:
    """`taken`: for each buffer that takes over memory, the storage that it lies in then."""

    def __init__(self, program: Program, items: Sequence[Group | Operation], buffer_table: BufferTable) -> None:
        self.buffer_table = buffer_table
        self.in_place: dict[str, str] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        shared = {buffer_table.buffers[name].storage for name in program.outputs if isinstance(name, str)}
        for place, item in enumerate(items):
            for storage in storages_at(item, buffer_table):
                self.first.setdefault(storage, place)
                self.last[storage] = place
                if not isinstance(item, PASSING_NOTHING_ON):
                    shared.add(storage)
        self.shared = shared

    def storage(self, name: str) -> str:
        return self.in_place.get(name, name)

    def at(self, position: int, group: Group, arguments: Sequence[str]) -> dict[str, str]:
        """For each storage that a group needs for the last time, the one that takes its memory over, if any does.
        `arguments`: what the group has in memory; one that only it needs may be among them."""
        new = [name for name in arguments if self.first[name] == position and self.is_new(name, group)]
        old = [name for name in arguments if self.last[name] == position and self.is_old(name)]
        pairs = [(old_name, new_name) for new_name in new for old_name in old if old_name != new_name]
        pairs = [pair for pair in pairs if same_size(*self.buffers(*pair))]
        if not pairs or not only_sets(group):
            return {}
        uses = uses_in(nests_of(group, self.buffer_table))
        taken_over: dict[str, str] = {}
        # the newest first: in every layer of a model that is the same one, so that kernels stay equal
        for old_name, new_name in sorted(pairs, key=lambda pair: -self.first[pair[0]]):
            if old_name in taken_over or new_name in taken_over.values():
                continue
            before, after = (*earlier(old_name, taken_over), old_name), (new_name, *later(new_name, taken_over))
            if all(self.over(uses[first], uses[then], group.rows) for first in before for then in after):
                taken_over[old_name] = new_name
        for name in new:
            if name in taken_over.values():
                self.in_place[name] = self.storage((*earlier(name, taken_over), name)[0])
        return taken_over

    def buffers(self, first: str, second: str) -> tuple[Buffer, Buffer]:
        return self.buffer_table.buffers[first], self.buffer_table.buffers[second]

    def is_new(self, name: str, group: Group) -> bool:
        written = any(access.writes for access in group.accesses[name])
        return written and self.buffer_table.buffers[name].kind == "owned"

    def is_old(self, name: str) -> bool:
        return name not in self.shared and self.buffer_table.buffers[name].kind in ("owned", "donated")

    def over(self, first: Sequence[_Use], then: Sequence[_Use], rows: Sequence[Axis]) -> bool:
        """Whether one storage is no longer needed, place by place, when the other is written."""
        return all(self.before(use, write, rows) for write in then if write.access.writes for use in first)

    def before(self, use: _Use, write: _Use, rows: Sequence[Axis]) -> bool:
        """Whether a place is used before it is written, whatever the order of rows and of points."""
        if use.nest < write.nest:
            seen = use.access
            if alike(*self.buffers(seen.buffer, write.access.buffer)):
                seen = replace(seen, buffer=write.access.buffer)
            return separated(seen, write.access, rows)
        if use.nest > write.nest or use.order + use.access.writes > write.order:
            return False
        return use.access.place is write.access.place and at_one_point(write)


def earlier(name: str, taken_over: Mapping[str, str]) -> tuple[str, ...]:
    """Those that had the memory before, the first first."""
    before = next((old for old, new in taken_over.items() if new == name), None)
    return () if before is None else (*earlier(before, taken_over), before)


def later(name: str, taken_over: Mapping[str, str]) -> tuple[str, ...]:
    return (taken_over[name], *later(taken_over[name], taken_over)) if name in taken_over else ()


@dataclass(frozen=True)
class _Use:
    """A touch by a member: the `order`-th of the `nest`-th nest."""

    nest: int
    order: int
    member: Member
    access: MemoryAccess


def uses_in(nests: Sequence[Nest]) -> dict[str, list[_Use]]:
    found: dict[str, list[_Use]] = {}
    for place, nest in enumerate(nests):
        for order, member in enumerate(nest.members):
            for access in member.accesses:
                found.setdefault(access.storage, []).append(_Use(place, order, member, access))
    return found


def storages_at(work: Group | Operation, buffer_table: BufferTable) -> Iterator[str]:
    if isinstance(work, Group):
        yield from work.accesses
        return
    for access in (*reads(work), *writes(work)):
        yield buffer_table.buffers[access.buffer].storage


def only_sets(group: Group) -> bool:
    """Whether nothing is combined with what is there: such loops are arranged in ways of their own."""
    return all(access.mode == "set" for accesses in group.accesses.values() for access in accesses)


def at_one_point(write: _Use) -> bool:
    """Whether different points write different elements."""
    member = write.member
    if isinstance(member.operation, Compute):
        return set(member.axes) <= member.free
    wanted = {item for item in member.axes if not is_one(item)}
    return isinstance(member.operation, Scan) and mixed_radix(write.access.place, wanted)


def same_size(first: Buffer, second: Buffer) -> bool:
    if first.dtype != second.dtype or first.device != second.device:
        return False
    if any(isinstance(size, Number) and size.value == 0 for size in (*first.sizes, *second.sizes)):
        return False
    return reach(first) is reach(second)


def reach(buffer: Buffer) -> Index:
    """How many elements lie between the first and the last, both counted."""
    total: Index = ONE
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        total = total + (size - 1) * stride
    return total


def alike(first: Buffer, second: Buffer) -> bool:
    """Whether the same coordinates are at the same places."""
    offsets = [each.offset if each.kind == "view" else ZERO for each in (first, second)]
    return first.sizes == second.sizes and first.strides == second.strides and offsets[0] is offsets[1]


def with_views(program: Program, in_place: Mapping[str, str]) -> Program:
    """The program, in which what takes over memory is a view of it."""
    if not in_place:
        return program

    def moved(buffer: Buffer) -> Buffer:
        if buffer.name in in_place:
            return replace(buffer, kind="view", base=in_place[buffer.name], offset=ZERO)
        return replace(buffer, base=in_place[buffer.storage]) if buffer.storage in in_place else buffer

    return replace(program, buffers=tuple(map(moved, program.buffers)))
