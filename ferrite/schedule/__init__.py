"""Scheduling: a program becomes kernels, and a plan of when each runs and where its memory is."""

from ferrite.schedule.fusion import BufferTable, Group, Member, likely, step_of
from ferrite.schedule.memory import accessed, bytes_at, peak_of, size_at
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import INTERPRETED, FusionRefusal, Launch, ParallelRegion, Plan, Run, Step, device_type
from ferrite.schedule.target import BuiltKernel, Postponing, RunMemory, Scheduling

__all__ = [
    "INTERPRETED",
    "BufferTable",
    "BuiltKernel",
    "FusionRefusal",
    "Group",
    "Launch",
    "Member",
    "ParallelRegion",
    "Plan",
    "Postponing",
    "Run",
    "RunMemory",
    "Scheduling",
    "Step",
    "accessed",
    "bytes_at",
    "device_type",
    "likely",
    "make_plan",
    "peak_of",
    "size_at",
    "step_of",
]
