"""What may be one kernel, and would run slower as one on a CPU."""

from __future__ import annotations

from ferrite.errors import Refusal
from ferrite.ir import Axis
from ferrite.ir.program import Attention
from ferrite.machines import Machine
from ferrite.schedule.cpu.convolutions import reason_apart
from ferrite.schedule.cpu.sorted_scatter import sorted_scatter_of
from ferrite.schedule.fusion.accesses import likely_points
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member, against_the_grain, is_in_pieces


def slower(group: Group, member: Member, rows: tuple[Axis, ...], machine: Machine) -> Refusal | None:
    """Why the two together would run slower than one after the other."""
    if any(isinstance(each.operation, Attention) for each in (group.members[0], member)):
        return Refusal("attention is a kernel of its own")
    if (refusal := reason_apart(group, member, rows)) is not None:
        return refusal
    members = [*group.members, member]
    work = max(each.points for each in members)
    if work > machine.serial_points:
        if rows != group.rows and any(each.inner(group.rows) and each.favourite in rows for each in group.members):
            return Refusal("columns are reduced in pieces, which threads share")
        if is_in_pieces(member, rows):
            return Refusal("columns are reduced in pieces, which threads share")
        count = likely_points(rows)
        if count < machine.min_shared_rows:
            return Refusal(f"only {count} rows in common" if rows else "no rows in common")
    refusal = against_the_grain(members, rows)
    return None if refusal is None or sorted_scatter_of(members, rows, machine) is not None else refusal
