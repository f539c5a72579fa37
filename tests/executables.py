"""From a plan to a function, as the compiler does it, without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrite.runtime import Boxed, load_host
from ferrite.schedule.plan import Plan
from ferrite.targets.cpu import CPU


def function_of(plan: Plan, objects: Mapping[str, Any]) -> Boxed:
    executable = CPU.compiled(plan)
    return load_host(executable.source, CPU.loaded(executable), objects)
