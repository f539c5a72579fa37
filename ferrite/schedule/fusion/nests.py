"""Inside a row: members that run in one loop, and the order of these loops.

A nest is one loop nest of a row: it has axes, and members that are computed at every point of them. A member is fused
into a nest where what it needs of the members there is at the same point; it comes after a nest of which it needs a
result, or other points. Stages of one nest pass values on without memory between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ferrite.ir import Axis
from ferrite.ir.program import Compute, Reduce, Scan
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, counterparts
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member


@dataclass
class Nest:
    """`axes` without those that are rows. `reduced`: axes over which states are combined, if any."""

    axes: tuple[Axis, ...]
    members: list[Member] = field(default_factory=list)
    ordered: bool = False  # one after the other, in one thread: a scan, or stores that may meet

    @property
    def reduced(self) -> tuple[Axis, ...]:
        found = [member.reduced for member in self.members if member.reduced]
        return found[0] if found else ()

    @property
    def has_states(self) -> bool:
        """Whether it has reductions. One over axes of one element has no axis left, but a state like any other."""
        return any(isinstance(member.operation, Reduce) for member in self.members)

    @property
    def scans(self) -> bool:
        """Whether all it does are scans."""
        return all(isinstance(member.operation, Scan) for member in self.members)

    @property
    def outer(self) -> tuple[Axis, ...]:
        """Axes that are not reduced, where something is."""
        reduced = set(self.reduced)
        return tuple(item for item in self.axes if item not in reduced) if self.has_states else ()

    @property
    def once_a_row(self) -> bool:
        """Whether its points are computed in the row itself, not in a loop and not while states are combined."""
        return not self.axes and not self.has_states


def nests_of(group: Group, buffer_table: BufferTable) -> list[Nest]:
    nests: list[Nest] = []
    for member in group.members:
        place(nests, member, group.rows, buffer_table)
    return nests


def place(nests: list[Nest], member: Member, rows: Sequence[Axis], buffer_table: BufferTable) -> None:
    inner = member.inner(rows)
    ordered = isinstance(member.operation, Scan) or any(
        item not in member.free and item not in member.reduced for item in inner
    )
    chosen: tuple[Nest, Member] | None = None
    for nest in reversed(nests):
        fused = None if ordered or nest.ordered else aligned(nest, member, inner, buffer_table)
        met = meeting(nest, fused or member)
        if fused is not None and met != "elsewhere" and chosen is None:
            chosen = nest, fused
        if met != "nowhere":
            break
    if chosen is None:
        same = next((nest for nest in nests if extents(nest.axes) == extents(inner) and not ordered), None)
        if same is not None:  # the same axes, so that equal expressions are seen to be equal
            member = member.renamed(by_order(inner, same.axes), buffer_table)
            inner = member.inner(rows)
        nests.append(Nest(inner, [member], ordered))
    else:
        chosen[0].members.append(chosen[1])


def extents(axes: Sequence[Axis]) -> tuple[object, ...]:
    return tuple(item.extent for item in axes)


def by_order(old: Sequence[Axis], new: Sequence[Axis]) -> dict[Axis, Axis]:
    return {left: right for left, right in zip(old, new, strict=True) if left is not right}


def aligned(nest: Nest, member: Member, inner: tuple[Axis, ...], buffer_table: BufferTable) -> Member | None:
    """The member over the axes of a nest, where it has as many and the same; None otherwise."""
    if len(inner) != len(nest.axes) or sorted(map(id, extents(inner))) != sorted(map(id, extents(nest.axes))):
        return None
    new = matched(nest, member, inner)
    if new is None:
        return None
    fused = member.renamed({old: axis for old, axis in new.items() if old is not axis}, buffer_table)
    if not isinstance(fused.operation, Reduce):
        return fused
    if nest.has_states:
        return fused if set(fused.reduced) == set(nest.reduced) else None
    return fused if isinstance(nest.members[0].operation, Compute) else None


def matched(nest: Nest, member: Member, inner: tuple[Axis, ...]) -> dict[Axis, Axis] | None:
    """Which axis of the nest each axis of the member is: by the coordinates where both stand, then by their order."""
    new: dict[Axis, Axis] = {item: item for item in inner if item in nest.axes}
    taken = set(new.values())
    for each in nest.members:
        for access in each.accesses:
            for other in member.accesses:
                if access.buffer != other.buffer:
                    continue
                pairs = zip(access.coordinates, other.coordinates, strict=True)
                for theirs, mine in itertools.chain.from_iterable(itertools.starmap(counterparts, pairs)):
                    if theirs not in nest.axes or mine not in inner or mine in new or theirs in taken:
                        continue
                    if theirs.extent is mine.extent:
                        new[mine] = theirs
                        taken.add(theirs)
    rest = [item for item in nest.axes if item not in taken]
    for mine in inner:
        if mine not in new:
            alike = next((item for item in rest if item.extent is mine.extent), None)
            if alike is None:
                return None
            new[mine] = alike
            rest.remove(alike)
    return new


def meeting(nest: Nest, member: Member) -> str:
    """Where a member needs what a nest accesses: "nowhere", at the "same point", or "elsewhere"."""
    found = "nowhere"
    for each in nest.members:
        for access in each.accesses:
            for other in member.accesses:
                if access.storage != other.storage or not (access.writes or other.writes):
                    continue
                if not same_point(each, access, member, other):
                    return "elsewhere"
                found = "same point"
    return found


def same_point(first: Member, access: MemoryAccess, second: Member, other: MemoryAccess) -> bool:
    """Whether two accesses meet at one point of the nest only, and the value is there by then."""
    if access.place is not other.place:
        return False
    results = (first, access), (second, other)
    return not any(accessed.writes and isinstance(member.operation, Reduce | Scan) for member, accessed in results)
