"""Rows and columns of one tensor in one kernel: a program goes through rows, and keeps what columns have come to.

    for piece in parallel(512):
        columns = 0
        for row in serial(64):
            what is computed of a row, in registers
            columns[j] += what is summed up in columns, for every j
        partial[piece, j] = columns[j]

The members of such a group have no rows in common but the pieces: `row_axes` says which axis of each member is the row
in a piece.

Of an unknown number of columns, registers hold as many as were seen. Where there turn out to be more, which is asked
once, the same kernel adds each row to its line of `partial` in memory, a block at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ferrite.ir import (
    ONE,
    STATES,
    Axis,
    Expr,
    Index,
    Load,
    Masked,
    Symbol,
    axis,
    cast,
    compare,
    data_of,
    flat_extent,
    index_value,
    minimum,
    nodes_of,
    number,
    op,
    substitute,
)
from ferrite.ir.kernel import Accumulate, Loop, Scratch, Statement, Store, When, nodes_in, walk
from ferrite.ir.program import Compute, Reduce
from ferrite.ir.program import Store as ProgramStore
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import BufferTable, counterparts, likely, likely_points, step_of
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member, member_of, moved
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.gpu.blocks import blocked, power_above, whole_elements, whole_lanes
from ferrite.schedule.gpu.rows import nest_loops
from ferrite.schedule.gpu.simplify import simplified
from ferrite.schedule.loops.axes import Body, collapse, nested, with_values
from ferrite.schedule.loops.placement import Placement, RowTile
from ferrite.schedule.loops.reductions import STORE_MODES
from ferrite.schedule.loops.statements import LoopStatements, Parts


def is_column_piece(member: Member, rows: Sequence[Axis]) -> bool:
    """Whether a member reduces columns over the rows of a piece, and has a result for every column."""
    operation = member.operation
    if not isinstance(operation, Reduce) or operation.kind not in STORE_MODES or len(operation.reduced) != 1:
        return False
    columns = [item for item in operation.axes if item not in rows]
    return len(columns) == 1 and member.favourite is columns[0]


def row_axes(members: Sequence[Member], rows: Sequence[Axis]) -> list[Axis] | None:
    """For every member, the axis that is the row in a piece; None where they are no such group. They are those that
    stand where the reduced axis of a column reduction stands."""
    columns = [place for place, member in enumerate(members) if is_column_piece(member, rows)]
    if not columns or len(columns) == len(members):
        return None
    row_of: dict[int, Axis] = {}  # by the place of the member
    rows_at: dict[tuple[str, int], tuple[Index, Axis]] = {}  # where a dimension of a buffer is indexed by a row

    def take(place: int, item: Axis) -> None:
        row_of[place] = item
        for access in members[place].accesses:
            for dim, at in enumerate(access.coordinates):
                if item in at.atoms:
                    rows_at.setdefault((access.buffer, dim), (at, item))

    take(columns[0], members[columns[0]].reduced[0])
    before = 0
    while before < len(row_of):
        before = len(row_of)
        for place, member in enumerate(members):
            if place not in row_of and (item := counterpart(member, rows_at)) is not None:
                take(place, item)
    if len(row_of) < len(members):
        return None
    for place, member in enumerate(members):
        item = row_of[place]
        if item not in (member.reduced if place in columns else member.free) or item in rows:
            return None
        if place not in columns and (
            item in member.reduced or not set(member.axes) <= member.free | set(member.reduced)
        ):
            return None
    return [row_of[place] for place in range(len(members))]


def counterpart(member: Member, rows_at: Mapping[tuple[str, int], tuple[Index, Axis]]) -> Axis | None:
    """The axis of a member that stands where rows of others stand."""
    for access in member.accesses:
        for dim, at in enumerate(access.coordinates):
            if (access.buffer, dim) in rows_at:
                other, row = rows_at[access.buffer, dim]
                mine = next((mine for theirs, mine in counterparts(other, at) if theirs is row), None)
                if mine is not None and mine.extent is row.extent:
                    return mine
    return None


def can_keep_columns(members: Sequence[Member], rows: Sequence[Axis], machine: GpuMachine) -> bool:
    """Whether the members can be one kernel that goes through rows and keeps columns, and enough programs do."""
    room = machine.kept_elements
    if likely_points(rows) < machine.multiprocessors:
        return False
    row_of = row_axes(members, rows)
    if row_of is None:
        return False
    columns = [is_column_piece(member, rows) for member in members]
    limit = column_limit(members, rows, row_of)
    sizes = [
        whole_elements([limited(item, limit) for item in member.axes if item not in rows and item is not row])
        for member, row in zip(members, row_of, strict=True)
    ]
    if not all(size is not None and size * (sum(columns) + 1) <= room for size in sizes):
        return False
    return all(
        meet_in_one_row(members, row_of, first, second, columns[first])
        for first in range(len(members))
        for second in range(len(members))
        if first != second
    )


@dataclass(frozen=True)
class Limit:
    """A number of columns that sizes decide, and lanes that held those that were seen."""

    extent: Index
    lanes: int

    @property
    def shorter(self) -> Index:
        return minimum(self.extent, number(self.lanes))


def column_limit(members: Sequence[Member], rows: Sequence[Axis], row_of: Sequence[Axis]) -> Limit | None:
    """None where the number of columns is bounded, or where nobody knows what it is likely to be."""
    extents = {
        item.extent
        for member, row in zip(members, row_of, strict=True)
        for item in member.axes
        if item not in rows and item is not row and item.extent.high is None
    }
    if len(extents) != 1:
        return None
    (extent,) = extents
    seen = all(isinstance(atom, Symbol) and atom.likely for atom in extent.atoms)
    return Limit(extent, power_above(likely(extent))) if seen else None


def limited(item: Axis, limit: Limit | None) -> Axis:
    """An axis of columns that ends where the lanes do."""
    return axis(item.name, limit.shorter) if limit is not None and item.extent is limit.extent else item


def with_limit(group: Group, row_of: Sequence[Axis], limit: Limit) -> Group:
    """The group with columns that lanes hold."""
    found = Group(group.rows, device=group.device)
    for member, row in zip(group.members, row_of, strict=True):
        columns = [item for item in member.axes if item is not row and item not in group.rows]
        new = {item: limited(item, limit) for item in columns}
        found.add(moved(member, new, {old: (each,) for old, each in new.items()}))
    return found


def meet_in_one_row(
    members: Sequence[Member], row_of: Sequence[Axis], first: int, second: int, is_column: bool
) -> bool:
    """Whether what one member writes is needed by another in the same row only; what a column comes to, by none."""
    for write in members[first].written:
        for access in members[second].accesses:
            if access.storage != write.storage:
                continue
            if is_column or write.buffer != access.buffer:
                return False
            read = [substitute(at, {row_of[second]: row_of[first]}) for at in access.coordinates]
            same = [at for at, there in zip(write.coordinates, read, strict=True) if at is there]
            if not any(row_of[first] in at.atoms for at in same):
                return False
    return True


# --- the kernel -------------------------------------------------------------------------------------------------------


class KeptColumns:
    """A group of rows and columns as one of rows: the columns are stores into tiles that outlive a row. `in_memory`: or
    into memory, whose lines are too long for registers."""

    def __init__(
        self, group: Group, row_of: Sequence[Axis], buffer_table: BufferTable, in_memory: bool = False
    ) -> None:
        self.pieces = group.rows
        self.row = next(item for item, member in zip(row_of, group.members, strict=True) if item not in member.reduced)
        self.columns = [member for member in group.members if is_column_piece(member, group.rows)]
        self.buffer_table, self.in_memory = buffer_table, in_memory
        members = []
        for member, item in zip(group.members, row_of, strict=True):
            member = member.renamed({item: self.row} if item is not self.row else {}, buffer_table)
            if is_column_piece(member, group.rows):
                member = member_of(as_combining_store(member.operation), buffer_table)
            members.append(member)
        self.rows = (*self.pieces, self.row)
        self.group = Group(self.rows, device=group.device)
        for member in members:
            self.group.add(member)

    def keep(self, placement: Placement) -> None:
        """The columns' results are tiles, until all rows are done."""
        for member in () if self.in_memory else self.columns:
            placement.tiles[self.storage(member)] = self.tile(member)

    def write(self, made: LoopStatements) -> None:
        """The columns' results are written in the end."""
        for member in self.columns:
            made.written.add(self.storage(member))
            made.types[self.storage(member)] = self.buffer_table.buffers[self.target(member)].dtype

    def elements(self) -> int:
        """That a program has in registers: what columns come to, and a row."""
        sizes = [self.tile(each).scratch.sizes[0].high or 0 for each in self.columns]
        return sum(sizes) + max(sizes)

    def storage(self, member: Member) -> str:
        return self.buffer_table.buffers[self.target(member)].storage

    def target(self, member: Member) -> str:
        (access,) = member.written
        return access.buffer

    def column(self, member: Member) -> Axis:
        (column,) = (item for item in member.axes if item not in self.pieces and item not in member.reduced)
        return column

    def dtype(self, member: Member) -> torch.dtype:
        """What is reduced in: results may be narrower, where no pieces are left to reduce."""
        assert isinstance(member.operation, Reduce)
        return member.operation.values[0].dtype

    def begin(self, member: Member) -> Expr:
        assert isinstance(member.operation, Reduce)
        return STATES[member.operation.kind].begin((self.dtype(member),))[0]

    def tile(self, member: Member) -> RowTile:
        buffer = self.buffer_table.buffers[self.target(member)]
        (access,) = member.written
        kept = tuple(place for place, at in enumerate(access.coordinates) if at not in self.pieces)
        column = self.column(member)
        sizes = tuple(column.extent if access.coordinates[place] is column else buffer.sizes[place] for place in kept)
        name = f"{buffer.name}_so_far"
        return RowTile(name, kept, sizes, Scratch(name, self.dtype(member), (flat_extent(sizes),)))

    def arranged(
        self, placement: Placement, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine
    ) -> Body:
        """The statements of a row, in a loop over those of a piece, between what begins and what ends the columns."""
        if self.in_memory:
            return self.arranged_in_memory(placement, nests, parts, machine)
        kept = {self.tile(member).name for member in self.columns}
        row: Body = tuple(tile.scratch for tile in placement.tiles.values() if tile.name not in kept)
        for nest, part in zip(nests, parts, strict=True):
            row += nest_loops(nest, part, None)
        tiles: list[Statement] = []
        first: list[Statement] = []
        last: list[Statement] = []
        for member in self.columns:
            tile, column = self.tile(member), self.column(member)
            (access,) = member.written
            lanes = whole_lanes(column.extent) or 1
            tiles.append(tile.scratch)
            at = tile.coordinates(access.coordinates)
            first.append(Loop(column, "vector", (Store(tile.name, at, self.begin(member)),), lanes))
            so_far = Load.intern(tile.name, at, tile.scratch.dtype)
            result = cast(so_far, self.buffer_table.buffers[access.buffer].dtype)
            last.append(Loop(column, "vector", (Store(access.storage, (access.place,), result),), lanes))
        before, row = with_lines_held(row, self.row, machine.kept_elements - self.elements())
        tiles += [item for item in before if isinstance(item, Scratch)]
        first += [item for item in before if not isinstance(item, Scratch)]
        rows = Loop(self.row, "serial", row, copies=machine.rows_under_way)
        return (*tiles, *first, rows, *last)

    def arranged_in_memory(
        self, placement: Placement, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine
    ) -> Body:
        room = machine.row_step_elements
        first: Body = ()
        for member in self.columns:
            (access,) = member.written
            begin = Store(access.storage, (access.place,), self.begin(member))
            first += blocked([self.column(member)], (begin,), "vector", room)[0]
        row: Body = tuple(tile.scratch for tile in placement.tiles.values())
        for nest, part in zip(nests, parts, strict=True):
            row += nest_loops(nest, part, room)
        return (*first, Loop(self.row, "serial", row))

    def over_pieces(self, body: Body) -> Body:
        """The grid around the statements of a piece."""
        axes, body = collapse(list(self.pieces), body)
        return simplified(nested(axes, body, "parallel"))


def by_length(limit: Limit, held: Body, longer: Body) -> Body:
    """The statements of a piece for as many columns as lanes hold, and for more of them."""
    length = index_value(limit.extent)
    is_held = compare("le", length, index_value(number(limit.lanes), length.dtype))
    return When(is_held, held), When(op("logical_not", is_held), longer)


def with_lines_held(body: Body, row: Axis, room: int) -> tuple[Body, Body]:
    """What every row reads again element by element, as the weights of a norm, in tiles that are filled before; and the
    statements of a row with these tiles. `room`: elements that registers have left. What a mask guards stays where it
    is: it need not be there for every row."""
    written = {item.buffer for item in walk(body) if isinstance(item, Store)}
    nodes = [item for statement in walk(body) for item in nodes_in(statement)]
    guarded = {each for item in nodes if isinstance(item, Masked) for each in nodes_of(item.value)}
    before: list[Statement] = []
    held: dict[Expr, Expr] = {}

    def replaced(statements: Body, around: tuple[Loop, ...]) -> Body:
        return tuple(replaced_in(statement, around) for statement in statements)

    def replaced_in(statement: Statement, around: tuple[Loop, ...]) -> Statement:
        if isinstance(statement, Loop):
            return replace(statement, body=replaced(statement.body, (*around, statement)))
        if isinstance(statement, Accumulate):
            return replace(statement, body=replaced(statement.body, around))
        if isinstance(statement, When):
            return statement
        for item in nodes_in(statement):
            if isinstance(item, Load) and item.buffer not in written and item not in guarded and item not in held:
                hold(item, around)
        return with_values(statement, held)

    def hold(item: Load, around: tuple[Loop, ...]) -> None:
        nonlocal room
        (place,) = item.coordinates
        loop = next((each for each in around if each.axis in place.atoms), None)
        if loop is None or row in place.atoms or data_of(place) or not is_line(place, loop) or loop.lanes > room:
            return
        if not place.atoms.isdisjoint(each.axis for each in around if each is not loop):
            return
        room -= loop.lanes
        name = f"{item.buffer}_line{len(held)}"
        before.append(Scratch(name, item.dtype, (loop.axis.extent,)))
        before.append(Loop(loop.axis, "vector", (Store(name, (loop.axis,), item),), loop.lanes))
        held[item] = Load.intern(name, (loop.axis,), item.dtype)

    inside = replaced(body, ())
    return tuple(before), inside


def is_line(place: Index, loop: Loop) -> bool:
    """Whether a loop has all of a line of memory in its lanes."""
    return step_of(place, loop.axis) is ONE and whole_lanes(loop.axis.extent) == loop.lanes


def as_combining_store(operation: object) -> Compute:
    """A column reduction as a store that combines with what is there."""
    assert isinstance(operation, Reduce)
    (value,), (destination,) = operation.values, operation.destinations
    assert destination is not None
    store = ProgramStore(destination.buffer, destination.coordinates, value, STORE_MODES[operation.kind])
    return Compute((*operation.axes, *operation.reduced), (store,), operation.origin)
