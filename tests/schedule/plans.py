"""Helpers of the scheduling tests: functions to plans, without passes before and without code after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.ir import Index, Number
from ferrite.ir.kernel.nodes import Kernel, Loop, walk
from ferrite.ir.program.nodes import Program
from ferrite.lower.graph import lower_module
from ferrite.machines import Machine
from ferrite.schedule.cpu import CpuScheduling
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Plan, Run
from ferrite.targets.cpu import refusal_of_operation
from tests.lower.lowered import traced

MACHINE = Machine()  # the same on every processor


class Unfused(CpuScheduling):
    """A processor on which every operation had better be a kernel of its own."""

    def slower(self, *_joined: object) -> Refusal:
        return Refusal("nothing is fused")


def make(program: Program, fuse: bool = True, machine: Machine = MACHINE) -> Plan:
    """The plan of a program, every step of it verified."""
    scheduling = (CpuScheduling if fuse else Unfused)(machine, refusal_of_operation)
    return make_plan(program, {"cpu": scheduling}, verify=True)


def plan_of(
    fn: Callable[..., Any],
    *inputs: torch.Tensor,
    fuse: bool = True,
    dynamic: bool = False,
    machine: Machine = MACHINE,
) -> Plan:
    """The plan of a function of these inputs; every kernel keeps the laws."""
    module = lower_module(traced(fn, *inputs, dynamic=dynamic))
    return make(module.program, fuse, machine)


def runs(plan: Plan) -> list[Run]:
    return [step for step in plan.steps if isinstance(step, Run)]


def memory(plan: Plan) -> set[str]:
    """Buffers that get memory: those that kernels touch and that did not come from outside."""
    kinds = {buffer.name: buffer.kind for buffer in plan.program.buffers}
    return {name for launch in plan.launches for name in launch.arguments if kinds[name] == "owned"}


def number(index: Index) -> int:
    """An index that is the same whatever comes in."""
    assert isinstance(index, Number), index
    return index.value


def extent(loop: Loop) -> int:
    return number(loop.axis.extent)


def loops(kernel: Kernel, kind: str) -> list[Loop]:
    return [item for item in walk(kernel.body) if isinstance(item, Loop) and item.kind == kind]
