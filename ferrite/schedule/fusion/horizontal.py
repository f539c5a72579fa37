"""Groups that need nothing of each other become one kernel, where a device would rather have fewer of them.

    launch sums of a, in pieces         launch sums of a and of b, in pieces
    call mm(...)                        launch the pieces of a and those of b, added up
    launch the pieces of a, added   =>  call mm(...)
    call mm(...)
    launch sums of b, in pieces
    launch the pieces of b, added

The later of two goes up to the earlier one, if nothing between makes what it needs; or else the earlier one goes down,
if nothing between needs what it makes. What a run of launches makes and needs has memory of the run: such a value does
not leave it for this. Groups are tried with the last few that are alike alone, so the whole is linear.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence

from ferrite.ir.program import Allocate, Assert, Operation, defines, reads, writes
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Fit, Group, fit
from ferrite.schedule.steps import device_type
from ferrite.schedule.target import Schedulings

MAX_TRIED = 4  # for one group, the last ones that are alike
MAX_DISTANCE = 24  # items between two that become one: what moves is in memory for longer


class HorizontalFusion:
    """The items of a program in order, while groups of them become one."""

    def __init__(
        self, items: list[Group | Operation], buffer_table: BufferTable, schedulings: Schedulings, fuel: Fuel
    ) -> None:
        self.items, self.buffer_table, self.schedulings, self.fuel = items, buffer_table, schedulings, fuel
        # Of each storage the place of the last item so far that writes or reads it, and the last run that touches it.
        self.writer: dict[str, int] = {}
        self.reader: dict[str, int] = {}
        self.last_run: dict[str, int] = {}
        self.runs = runs_of(items)
        self.alike: dict[Hashable, list[int]] = collections.defaultdict(list)

    def run(self) -> None:
        keys = {place: self.key(item) for place, item in enumerate(self.items) if isinstance(item, Group)}
        counted = collections.Counter(key for key in keys.values() if key is not None)
        if not self.fuel.left or max(counted.values(), default=0) < 2 or any(map(settles_sizes, self.items)):
            return
        for place, item in enumerate(self.items):
            for storage in set().union(*touched(item, self.buffer_table)):
                self.last_run[storage] = self.runs[place]
        for place, item in enumerate(self.items):
            key = keys.get(place)
            self.settle(self.united(place, item, key) if isinstance(item, Group) and key is not None else place)

    def key(self, group: Group) -> Hashable:
        """What a group must have in common with others to be one kernel with them; None for one that stays alone."""
        found = self.schedulings[device_type(group.device)].alike(group, self.buffer_table) if group.members else None
        return None if found is None else (group.device, found)

    def settle(self, place: int) -> None:
        read, written = touched(self.items[place], self.buffer_table)
        for name in read:
            self.reader[name] = max(self.reader.get(name, -1), place)
        for name in written:
            self.writer[name] = max(self.writer.get(name, -1), place)

    def united(self, place: int, group: Group, key: Hashable) -> int:
        """Where a group is in the end."""
        known = self.alike[key]
        for other in reversed([each for each in known[-MAX_TRIED:] if place - each <= MAX_DISTANCE]):
            first = self.items[other]
            assert isinstance(first, Group)
            goes_up = self.may_go_up(group, other)
            if not self.fuel.left or not (goes_up or self.may_go_down(first, other, group, place)):
                continue
            if (together := self.together(first, group)) is None:
                continue
            self.fuel.spend()
            to, away = (other, place) if goes_up else (place, other)
            self.items[to], self.items[away] = together, Group(())
            if not goes_up:
                known.remove(other)
                known.append(place)
            return to
        known.append(place)
        return place

    def may_go_up(self, group: Group, to: int) -> bool:
        read, written = touched(group, self.buffer_table)
        found = {self.writer.get(name, -1) for name in read | written} | {self.reader.get(name, -1) for name in written}
        return max(found, default=-1) < to

    def may_go_down(self, first: Group, place: int, group: Group, to: int) -> bool:
        read, written = touched(first, self.buffer_table)
        theirs, made = touched(group, self.buffer_table)
        if not written.isdisjoint(theirs | made) or not read.isdisjoint(made):
            return False
        if any(max(self.writer.get(name, -1), self.reader.get(name, -1)) > place for name in written):
            return False
        if any(self.writer.get(name, -1) > place for name in read):
            return False
        return self.runs[place] == self.runs[to] or not any(self.is_of_run(name, place) for name in read - written)

    def is_of_run(self, name: str, place: int) -> bool:
        """Whether a run makes what it needs, and nothing behind it does."""
        made = self.writer.get(name, -1)
        here = made >= 0 and isinstance(self.items[made], Group) and self.runs[made] == self.runs[place]
        return here and self.last_run[name] == self.runs[place]

    def together(self, first: Group, second: Group) -> Group | None:
        merged = first.copy()
        slower = self.schedulings[device_type(first.device)].slower
        rows = dict(zip(first.rows, second.rows, strict=True))
        for member in second.members:
            found = fit(merged, member, self.buffer_table, slower, rows)
            if not isinstance(found, Fit) or found.rows != first.rows:
                return None
            merged.add(found.member)
        return merged if self.key(merged) is not None else None


def touched(item: Group | Operation, buffer_table: BufferTable) -> tuple[set[str], set[str]]:
    """The storages that an item reads, and those that it writes."""
    if isinstance(item, Group):
        found = [access for accesses in item.accesses.values() for access in accesses]
        written = {access.storage for access in found if access.writes}
        return {access.storage for access in found if not access.writes or access.mode != "set"}, written
    buffers = buffer_table.buffers
    read = {buffers[access.buffer].storage for access in reads(item)}
    return read, {buffers[access.buffer].storage for access in writes(item)}


def settles_sizes(item: Group | Operation) -> bool:
    """Whether an item gives a size its value or checks it: it comes before whatever may rely on that."""
    return not isinstance(item, Group) and (isinstance(item, Assert) or bool(defines(item)))


def runs_of(items: Sequence[Group | Operation]) -> list[int]:
    """For each item the number of its run: launches with nothing else between."""
    found, number = [], 0
    for item in items:
        if not isinstance(item, Group | Allocate):
            number += 1
        found.append(number)
    return found
