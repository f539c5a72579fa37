"""What may be one kernel, and would run slower as one on a CPU."""

from __future__ import annotations

import math

from ferrite.errors import Refusal
from ferrite.ir.index import Axis
from ferrite.ir.program import Reduce, Scan
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.cpu.sorted_scatter import sorted_scatter_of
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.stages import Stage


def slower(group: Group, stage: Stage, rows: tuple[Axis, ...], machine: Machine) -> Refusal | None:
    """Why the two together would run slower than one after the other."""
    stages = [*group.stages, stage]
    work = max(each.points for each in stages)
    if work > machine.serial_points:
        if rows != group.rows and any(each.inner(group.rows) and each.favourite in rows for each in group.stages):
            return Refusal("columns are reduced in pieces, which threads share")
        if in_pieces(stage, rows):
            return Refusal("columns are reduced in pieces, which threads share")
        count = math.prod(likely(row.extent) for row in rows)
        if count < machine.min_shared_rows:
            return Refusal(f"only {count} rows in common" if rows else "no rows in common")
    return against_the_grain(stages, rows)


def in_pieces(stage: Stage, rows: tuple[Axis, ...]) -> bool:
    """Whether a stage reduces columns, and has more rows than these: pieces, which would not be shared."""
    if not stage.reduced or stage.favourite not in rows:
        return False
    return any(item in stage.free and item not in stage.reduced and item not in rows for item in stage.axes)


def against_the_grain(stages: list[Stage], rows: tuple[Axis, ...]) -> Refusal | None:
    """Rows whose neighbours lie side by side are columns: only reductions and what is done once a row go together."""
    columns = [stage for stage in stages if stage.inner(rows) and stage.favourite in rows]
    if not columns:
        return None
    if sorted_scatter_of(stages, rows) is not None:
        return None
    across = [stage for stage in stages if stage.inner(rows) and stage not in columns]
    if across or not all(isinstance(stage.operation, Reduce | Scan) for stage in columns):
        return Refusal("one goes along memory, the other across")
    return None
