"""From a plan to a function, as the compiler does it, without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrite.ir.program.nodes import Program
from ferrite.runtime import Boxed, load_host
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Plan
from ferrite.targets import executable_of, runs_of
from ferrite.targets.cpu import CPU

TARGETS = {"cpu": CPU}


def plan_of(program: Program) -> Plan:
    """For this processor, every step verified."""
    return make_plan(program, {"cpu": CPU.scheduling}, verify=True)


def function_of(plan: Plan, objects: Mapping[str, Any]) -> Boxed:
    executable = executable_of(plan, TARGETS)
    return load_host(executable.source, runs_of(executable, TARGETS), objects)
