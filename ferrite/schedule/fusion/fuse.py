"""From a list of operations to a list of items: groups of loops, each to become one kernel, and what stands between.

Program order is the meaning. An operation may move forward to a group that stands earlier, but not before anything it
depends on: what writes what it reads, what reads or writes what it writes, what gives a symbol its value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ferrite.errors import Refusal
from ferrite.ir import Symbol
from ferrite.ir.program import (
    Assert,
    Attention,
    Compute,
    LoopOperation,
    Operation,
    Program,
    Reduce,
    Scan,
    defines,
    has_effect,
    reads,
    symbols,
    writes,
)
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Fit, Group, begin, bind, fit, shared_bytes
from ferrite.schedule.fusion.members import FreshAxes, Member, member_of
from ferrite.schedule.steps import FusionRefusal, device_type
from ferrite.schedule.target import Schedulings

MAX_GROUPS_TRIED = 6  # for one operation, those that share most bytes first: a limit on compile time


@dataclass
class Ordered:
    """`not_compiled`: why a loop is not, by its place among the items."""

    items: list[Group | Operation] = field(default_factory=list)
    not_compiled: dict[int, Refusal] = field(default_factory=dict)
    not_fused: list[FusionRefusal] = field(default_factory=list)


class Order:
    def __init__(self, program: Program, schedulings: Schedulings, fuel: Fuel) -> None:
        self.program, self.schedulings, self.fuel = program, schedulings, fuel
        self.buffer_table = BufferTable(program)
        self.names = FreshAxes()
        self.ordered = Ordered()
        self.writer: dict[str, int] = {}
        self.reader: dict[str, int] = {}
        self.definer: dict[Symbol, int] = {}
        self.effect = -1
        self.after: dict[int, int] = {}  # of groups: the place of the last item that they depend on
        self.apart: set[tuple[int, int]] = set()  # groups that do not become one

    def run(self) -> Ordered:
        for operation in self.program.operations:
            self.take(operation)
        return self.ordered

    # --- dependences --------------------------------------------------------------------------------------------------

    def storage(self, name: str) -> str:
        return self.buffer_table.buffers[name].storage

    def needed(self, read: set[str], written: set[str], operation: Operation) -> set[int]:
        """The places of the items that an operation depends on: of those that touch one thing the last."""
        found = {self.writer.get(name, -1) for name in read | written}
        found |= {self.reader.get(name, -1) for name in written}
        if self.definer:
            found |= {self.definer.get(name, -1) for name in self.symbols_needed(operation)}
        if has_effect(operation):
            found.add(self.effect)
        return found

    def symbols_needed(self, operation: Operation) -> set[Symbol]:
        """Those in an operation itself, and in the layouts of what it accesses: one that writes a single row of a new
        tensor cannot run before it is known how many rows there are."""
        names = {access.buffer for access in (*reads(operation), *writes(operation))}
        return set(symbols(operation)).union(*map(self.buffer_table.layout_symbols, names))

    def settle(self, position: int, read: set[str], written: set[str], operation: Operation) -> None:
        for name in read:
            self.reader[name] = max(self.reader.get(name, -1), position)
        for name in written:
            self.writer[name] = max(self.writer.get(name, -1), position)
        for symbol in defines(operation):
            self.definer[symbol] = position
        if isinstance(operation, Assert):  # what follows may rely on it
            for symbol in symbols(operation):
                self.definer[symbol] = position
        if has_effect(operation):
            self.effect = position

    # --- operations ---------------------------------------------------------------------------------------------------

    def take(self, operation: Operation) -> None:
        read = {self.storage(access.buffer) for access in reads(operation)}
        written = {self.storage(access.buffer) for access in writes(operation)}
        place = self.fuse_or_append(operation, self.needed(read, written, operation))
        self.settle(place, read, written, operation)

    def fuse_or_append(self, operation: Operation, needed: set[int]) -> int:
        """The place of the item that the operation is part of now."""
        if not isinstance(operation, Compute | Reduce | Scan | Attention):
            return self.append(operation)
        device = self.device_of(operation)
        scheduling = self.schedulings.get(device_type(device))
        if scheduling is None:
            return self.leave(operation, Refusal(f"no kernels are made on {device}"))
        if (refusal := scheduling.refuses(operation)) is not None:
            return self.leave(operation, refusal)
        member = member_of(operation, self.buffer_table)
        if (refusal := hazard(member, self.buffer_table)) is not None:
            return self.leave(operation, refusal)
        if self.fuel.left:
            needed = self.merged(member, needed, device)
            for place in self.candidates(member, max(needed, default=-1), device):
                group = self.ordered.items[place]
                assert isinstance(group, Group)
                found = fit(group, member, self.buffer_table, scheduling.slower, names=self.names)
                if isinstance(found, Fit):
                    self.fuel.spend()
                    group.rows = found.rows
                    group.add(found.member)
                    self.after[place] = max(self.after[place], *(needed - {place}), -1)
                    return place
                self.refused(operation, group, found)
        place = self.append(begin(member.renamed(self.names.all_fresh(member.axes), self.buffer_table), device))
        self.after[place] = max(needed, default=-1)
        return place

    def leave(self, operation: Operation, refusal: Refusal) -> int:
        """An operation that does not become part of a kernel."""
        place = self.append(operation)
        self.ordered.not_compiled[place] = refusal.at(operation.origin.line)
        return place

    def device_of(self, operation: LoopOperation) -> str:
        """The device that a loop runs on: that of what it writes."""
        return next((str(self.buffer_table.buffers[access.buffer].device) for access in writes(operation)), "cpu")

    def merged(self, member: Member, needed: set[int], device: str) -> set[int]:
        """Where the last thing that a member needs is a group, and it shares memory with an earlier group too, the two
        groups become one if nothing stands between them: the member can then be fused into both."""
        last = max(needed, default=-1)
        others = needed - {last}
        group = self.ordered.items[last] if last >= 0 else None
        if not isinstance(group, Group):
            return needed
        if group.device != device:
            return needed
        for place in self.candidates(member, max(self.after[last], *others, -1), device):
            if place < last and (place, last) not in self.apart:
                if self.became_one(place, last, member):
                    return others | {place}
                self.apart.add((place, last))
        return needed

    def became_one(self, earlier: int, later: int, link: Member) -> bool:
        """The later group's members at the end of the earlier one, where each fits and no rows are lost. Rows that go
        with the same axis of the link go together."""
        first, second = self.ordered.items[earlier], self.ordered.items[later]
        assert isinstance(first, Group)
        assert isinstance(second, Group)
        theirs = {mine: row for row, mine in bind(second, link).items()}
        rows = {row: theirs[mine] for row, mine in bind(first, link).items() if mine in theirs}
        if len(rows) != len(first.rows) or len(rows) != len(second.rows):
            return False
        merged_group = first.copy()
        slower = self.schedulings[device_type(first.device)].slower
        for member in second.members:
            found = fit(merged_group, member, self.buffer_table, slower, rows)
            if not isinstance(found, Fit) or found.rows != first.rows:
                return False
            merged_group.add(found.member)
        self.fuel.spend()
        self.ordered.items[earlier], self.ordered.items[later] = merged_group, Group(())
        self.after[earlier] = max(self.after[earlier], self.after[later])
        for table in (self.writer, self.reader):
            for storage in second.accesses:
                if table.get(storage) == later:
                    table[storage] = earlier
        return True

    def append(self, work: Group | Operation) -> int:
        self.ordered.items.append(work)
        return len(self.ordered.items) - 1

    def candidates(self, member: Member, earliest: int, device: str) -> list[int]:
        """Groups not before what the member depends on, those that share most bytes first, of equals the latest."""
        places = {
            place
            for access in member.accesses
            for table in (self.writer, self.reader)
            if (place := table.get(access.storage, -1)) >= max(earliest, 0)
        }
        groups = [(place, item) for place in places if isinstance(item := self.ordered.items[place], Group)]
        groups = [(place, group) for place, group in groups if group.device == device]
        if len(groups) > 1:
            groups.sort(key=lambda pair: (-shared_bytes(pair[1], member, self.buffer_table), -pair[0]))
        return [place for place, _ in groups[:MAX_GROUPS_TRIED]]

    def refused(self, operation: LoopOperation, group: Group, refusal: Refusal) -> None:
        there = tuple(node for each in group.operations for node in each.origin.nodes)
        self.ordered.not_fused.append(FusionRefusal(operation.origin.nodes, there, refusal.at(operation.origin.line)))


def hazard(member: Member, buffer_table: BufferTable) -> Refusal | None:
    """Why a loop cannot stand for an operation, which reads all it needs before it writes."""
    types: dict[str, torch.dtype] = {}
    for access in member.accesses:
        dtype = buffer_table.buffers[access.buffer].dtype
        if types.setdefault(access.storage, dtype) != dtype:
            return Refusal(f"{access.storage} is seen as two types")
    for write in member.written:
        for access in member.accesses:
            if access.storage == write.storage and access.place is not write.place and not access.writes:
                return Refusal(f"it reads other elements of {write.buffer} than it writes")
    return None
