"""Small kernels that would rather be one: to start a kernel and wait for its first loads takes two microseconds."""

from __future__ import annotations

from collections.abc import Hashable

from ferrite.ir.program import Compute, Reduce
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group, bytes_about
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.gpu.products import is_product
from ferrite.schedule.gpu.profit import is_ordered
from ferrite.schedule.loops.reductions import STORE_MODES


def alike(group: Group, buffer_table: BufferTable, machine: GpuMachine) -> Hashable:
    """What two groups must have in common to be one kernel though they need nothing of each other; None for a group
    that is better alone. They have equal rows, go along memory in the same direction, and touch so little of it that
    starting them counts. Either all of it is elementwise, or all of it reduces columns: a row that is reduced is kept
    in registers, and two of them would not fit."""
    members = group.members
    if len(members) > machine.max_members_beside or any(is_ordered(member) for member in members) or not group.rows:
        return None
    if all(isinstance(member.operation, Compute) for member in members):
        kind = "elementwise"
    elif is_product(members[0].operation):
        return None
    elif all(isinstance(member.operation, Reduce) and is_across(member, group) for member in members):
        kind = "columns"
    else:
        return None
    if sum(bytes_about(storage, buffer_table) for storage in group.accesses) > machine.small_bytes:
        return None
    inner = {
        tuple(item.extent for item in member.inner(group.rows) if item not in member.reduced) for member in members
    }
    directions = {group.rows.index(member.favourite) if member.favourite in group.rows else -1 for member in members}
    if len(directions) != 1:
        return None
    return kind, tuple(row.extent for row in group.rows), frozenset(inner), directions.pop()


def is_across(member: Member, group: Group) -> bool:
    """Whether it reduces columns, which stores can combine, and has a result for each row of the group and no more."""
    operation = member.operation
    assert isinstance(operation, Reduce)
    columns_alone = set(member.inner(group.rows)) == set(operation.reduced)
    return operation.kind in STORE_MODES and columns_alone and member.favourite in group.rows
