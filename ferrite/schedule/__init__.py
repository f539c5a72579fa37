"""Scheduling: a program becomes kernels, and a plan of when each runs and where its memory is."""

from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import INTERPRETED, FusionRefusal, Launch, ParallelRegion, Plan, Run, Step, device_type
from ferrite.schedule.target import BuiltKernel, Postponing, RunMemory, Scheduling

__all__ = [
    "INTERPRETED",
    "BuiltKernel",
    "FusionRefusal",
    "Launch",
    "ParallelRegion",
    "Plan",
    "Postponing",
    "Run",
    "RunMemory",
    "Scheduling",
    "Step",
    "device_type",
    "make_plan",
]
