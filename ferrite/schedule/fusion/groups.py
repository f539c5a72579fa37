"""Fusion: which operations become one kernel.

A group runs its members, one for each operation, row by row: all members of a row, then the next row. Rows are axes
that every member has; rows are independent, so they are spread over threads. What one member writes and another reads
must be in the same row. So a softmax, a layer norm with what comes before and after, or the pieces of a concatenation
and their reader are one group; its rows get fewer axes when a member is fused that needs more of a tensor at once (a
sum over the last axis).

Operations are taken in program order. Each is fused into the group with which it shares most bytes, among the groups
that do not come before something it depends on; or it begins a group. An operation that needs a group and shares memory
with an earlier one makes one of both, if nothing stands between. What is asked is local, and the whole is linear in the
number of accesses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ferrite.errors import Refusal
from ferrite.ir import Axis, Index
from ferrite.ir.program import LoopOperation, Origin
from ferrite.schedule.fusion.accesses import (
    BufferTable,
    MemoryAccess,
    counterparts,
    elements_are_apart,
    is_one,
    likely,
    separated,
)
from ferrite.schedule.fusion.members import FreshAxes, Member

MAX_MEMBERS = 48  # of one group: a limit on the time to compile it
MAX_POINTERS = 48  # that a kernel is given: the same


@dataclass
class Group:
    """`device`: the type of the device that all of it runs on."""

    rows: tuple[Axis, ...]
    members: list[Member] = field(default_factory=list)
    accesses: dict[str, list[MemoryAccess]] = field(default_factory=dict)  # by storage, each place once
    device: str = "cpu"

    def add(self, member: Member) -> None:
        self.members.append(member)
        for access in member.accesses:
            recorded = self.accesses.setdefault(access.storage, [])
            if access not in recorded:
                recorded.append(access)

    def copy(self) -> Group:
        accesses = {name: list(accesses) for name, accesses in self.accesses.items()}
        return Group(self.rows, list(self.members), accesses, self.device)

    @property
    def operations(self) -> tuple[LoopOperation, ...]:
        return tuple(member.operation for member in self.members)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys(operation.origin for operation in self.operations))


# Why a member in a group would run slower than after it, row by row.
Slower = Callable[[Group, Member, tuple[Axis, ...]], Refusal | None]


def begin(member: Member, device: str = "cpu") -> Group:
    """A group of one: rows are all axes whose order is free."""
    rows = tuple(item for item in member.axes if item in member.free and item not in member.reduced)
    group = Group(rows, device=device)
    group.add(member)
    return group


@dataclass(frozen=True)
class Fit:
    """How an operation is fused into a group: under these axes, with these rows."""

    member: Member
    rows: tuple[Axis, ...]


def fit(
    group: Group,
    member: Member,
    buffer_table: BufferTable,
    slower: Slower,
    bound: Mapping[Axis, Axis] | None = None,
    names: FreshAxes | None = None,
) -> Fit | Refusal:
    """`slower`: why they would be together, on their device; `bound`: the member's axis for each row, where that is
    known; `names`: for the axes that are no rows, where the member has those of the program."""
    if len(group.members) >= MAX_MEMBERS:
        return Refusal(f"the kernel has {MAX_MEMBERS} operations already")
    if len(group.accesses.keys() | {access.storage for access in member.accesses}) > MAX_POINTERS:
        return Refusal(f"together they touch more than {MAX_POINTERS} storages")
    bound = bind(group, member) if bound is None else bound
    rows = tuple(row for row in group.rows if row in bound or is_one(row))
    new = {mine: row for row, mine in bound.items()}
    if names is not None:
        new |= names.all_fresh(item for item in member.axes if item not in new)
    fused = member.renamed(new, buffer_table)
    for access in fused.accesses:
        for other in group.accesses.get(access.storage, ()):
            if buffer_table.buffers[access.buffer].dtype != buffer_table.buffers[other.buffer].dtype:
                return Refusal(f"{access.storage} is seen as two types")
            if (access.writes or other.writes) and not (separated(access, other, rows) or apart(access, other)):
                return Refusal(f"what one has of {access.buffer} in a row, the other needs in other rows")
    if beside(group, fused) and written_bytes(group, fused, buffer_table) > shared_bytes(group, fused, buffer_table):
        return Refusal("they need nothing of each other, and together hold more than they read")
    worse = slower(group, fused, rows)
    return worse or Fit(fused, rows)


def beside(group: Group, member: Member) -> bool:
    """Whether a member only reads other elements of the same tensors: nothing is saved by fusing it."""
    pairs = [(access, other) for access in member.accesses for other in group.accesses.get(access.storage, ())]
    return bool(pairs) and all(not (access.writes or other.writes) and apart(access, other) for access, other in pairs)


def apart(first: MemoryAccess, second: MemoryAccess) -> bool:
    """Whether two accesses are of different parts of a tensor: along an axis, one ends before the other begins."""
    if first.buffer != second.buffer or not elements_are_apart(first.layout):
        return False
    both = zip(first.coordinates, second.coordinates, strict=True)
    return any(ends_before(one, other) or ends_before(other, one) for one, other in both)


def ends_before(first: Index, second: Index) -> bool:
    return first.high is not None and second.low is not None and first.high < second.low


def written_bytes(group: Group, member: Member, buffer_table: BufferTable) -> int:
    accesses = itertools.chain(member.accesses, *group.accesses.values())
    return sum(
        bytes_about(storage, buffer_table) for storage in {access.storage for access in accesses if access.writes}
    )


def bind(group: Group, member: Member) -> dict[Axis, Axis]:
    """Which axis of the member goes with which row: the one that stands in the same coordinate of the same buffer."""
    bound: dict[Axis, Axis] = {}
    taken: set[Axis] = set()
    refused: set[Axis] = set()
    # what is written decides; what both only read is a hint where nothing is
    ranked = sorted(member.accesses, key=lambda access: not access.writes)
    for wanted in (True, False):
        for access in ranked:
            for other in group.accesses.get(access.storage, ()):
                if (access.writes or other.writes) is not wanted or access.buffer != other.buffer:
                    continue
                pairs = zip(other.coordinates, access.coordinates, strict=True)
                for row, mine in itertools.chain.from_iterable(itertools.starmap(counterparts, pairs)):
                    if row not in group.rows or mine not in member.axes:
                        continue
                    if row in bound or row in refused or mine in taken:
                        continue
                    if mine in member.free and row.extent is mine.extent:
                        bound[row] = mine
                        taken.add(mine)
                    elif wanted:
                        refused.add(row)
    return bound


def shared_bytes(group: Group, member: Member, buffer_table: BufferTable) -> int:
    """Bytes that need not be read again when the member is fused."""
    common = {access.storage for access in member.accesses} & group.accesses.keys()
    return sum(bytes_about(storage, buffer_table) for storage in common)


def bytes_about(storage: str, buffer_table: BufferTable) -> int:
    buffer = buffer_table.buffers[storage]
    return math.prod((likely(size) for size in buffer.sizes), start=buffer.dtype.itemsize)
