"""Which operations become one kernel: memory that each accesses, what depends on what, groups, repeats of them."""

from ferrite.schedule.fusion.accesses import BufferTable, likely, step_of
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member

__all__ = [
    "BufferTable",
    "Group",
    "Member",
    "likely",
    "step_of",
]
