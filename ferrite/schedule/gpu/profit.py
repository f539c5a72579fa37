"""What may be one kernel, and would run slower as one on a GPU."""

from __future__ import annotations

import math

from ferrite.errors import Refusal
from ferrite.ir import Axis
from ferrite.ir.program import Attention, Reduce, Scan
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely, likely_points
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member, against_the_grain, is_in_pieces
from ferrite.schedule.gpu.blocks import whole_elements
from ferrite.schedule.gpu.kept_columns import can_keep_columns, is_column_piece
from ferrite.schedule.gpu.products import is_product, reason_apart
from ferrite.schedule.gpu.unknown_rows import in_row_pieces


def slower(group: Group, member: Member, rows: tuple[Axis, ...], machine: GpuMachine) -> Refusal | None:
    """Why the two together would run slower than one after the other."""
    if any(isinstance(each.operation, Attention) for each in (group.members[0], member)):
        return Refusal("attention is a kernel of its own")
    if any(is_product(each.operation) for each in (group.members[0], member)):
        return reason_apart(group, member, rows)
    members = [*group.members, member]
    if any(is_ordered(each) for each in members):
        return Refusal("points that may meet in memory are a kernel of their own")
    if len(rows) < len(group.rows) and only_reads_a_line(group, member, machine):
        return Refusal("a few numbers are all that both read, and they have other rows")
    if max(each.points for each in members) > machine.one_program_points:
        if needs_kept_columns(members, rows, machine):
            if can_keep_columns(members, rows, machine):
                return None
            return Refusal("columns are reduced in pieces, which programs share")
        if rows != group.rows and any(each.inner(group.rows) and each.favourite in rows for each in group.members):
            return Refusal("columns are reduced in pieces, which programs share")
        if is_in_pieces(member, rows):
            return Refusal("columns are reduced in pieces, which programs share")
        if not rows and can_keep_columns_of_pieces(members, machine):
            return None
        count = likely_points(rows)
        longest = max(each.points for each in members) // max(count, 1)
        if count < machine.multiprocessors and longest > machine.one_program_elements:
            return Refusal(f"only {count} rows in common" if rows else "no rows in common")
    if (column := kept_column(members, rows)) is not None and can_keep_columns(members, without(rows, column), machine):
        return None
    return against_the_grain(members, rows)


def can_keep_columns_of_pieces(members: list[Member], machine: GpuMachine) -> bool:
    """The same where pieces of rows end where these do."""
    cut = in_row_pieces(members)
    return cut is not None and can_keep_columns(cut.members, cut.rows, machine)


def only_reads_a_line(group: Group, member: Member, machine: GpuMachine) -> bool:
    """Whether all that a member has to do with a group is to read some tensors that are hardly there, as a learning
    rate is: one program would do both, one after the other."""
    pairs = [(access, other) for access in member.accesses for other in group.accesses.get(access.storage, ())]
    if any(access.writes or other.writes for access, other in pairs):
        return False
    layouts = {access.storage: access.layout for access, _ in pairs}.values()
    return sum(math.prod(map(likely, each.sizes)) * each.dtype.itemsize for each in layouts) < machine.line_bytes


def needs_kept_columns(members: list[Member], rows: tuple[Axis, ...], machine: GpuMachine) -> bool:
    """Whether some reduce columns that others go across, and a program cannot hold all of it."""
    columns = [is_column_piece(member, rows) for member in members]
    if not any(columns) or all(columns):
        return False
    sizes = [whole_elements(member.inner(rows)) for member in members]
    return any(size is None or size > machine.max_held_elements for size in sizes)


def kept_column(members: list[Member], rows: tuple[Axis, ...]) -> Axis | None:
    """The row that is a column of what some reduce and others go through element by element: then a program goes
    through whole rows, and keeps all columns."""
    if all(member.reduced for member in members):
        return None
    found = {member.favourite for member in members if member.inner(rows)}
    column = found.pop() if len(found) == 1 else None
    if column is None or column not in rows:
        return None
    return column


def without(rows: tuple[Axis, ...], column: Axis) -> tuple[Axis, ...]:
    return tuple(row for row in rows if row is not column)


def is_ordered(member: Member) -> bool:
    """Whether points of it may write the same element, so that their order counts."""
    return not isinstance(member.operation, Reduce | Scan) and not all(item in member.free for item in member.axes)
