"""What may be one kernel, and would run slower as one on a GPU."""

from __future__ import annotations

import math

from ferrite.errors import Refusal
from ferrite.ir.index import Axis
from ferrite.ir.program import Reduce, Scan
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.stages import Stage, against_the_grain, in_pieces
from ferrite.schedule.gpu.machine import GpuMachine

MAX_POINTS_OF_ONE_PROGRAM = 1 << 14  # so little work that one program does it as fast as many


def slower(group: Group, stage: Stage, rows: tuple[Axis, ...], machine: GpuMachine) -> Refusal | None:
    """Why the two together would run slower than one after the other."""
    stages = [*group.stages, stage]
    if any(is_ordered(each) for each in stages):
        return Refusal("points that may meet in memory are a kernel of their own")
    if max(each.points for each in stages) > MAX_POINTS_OF_ONE_PROGRAM:
        if rows != group.rows and any(each.inner(group.rows) and each.favourite in rows for each in group.stages):
            return Refusal("columns are reduced in pieces, which programs share")
        if in_pieces(stage, rows):
            return Refusal("columns are reduced in pieces, which programs share")
        count = math.prod(likely(row.extent) for row in rows)
        longest = max(each.points for each in stages) // max(count, 1)
        if count < machine.multiprocessors and longest > machine.one_program:
            return Refusal(f"only {count} rows in common" if rows else "no rows in common")
    return against_the_grain(stages, rows)


def is_ordered(stage: Stage) -> bool:
    return not isinstance(stage.operation, Reduce | Scan) and not all(item in stage.free for item in stage.axes)
