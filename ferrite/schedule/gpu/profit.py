"""What may be one kernel, and would run slower as one on a GPU."""

from __future__ import annotations

import math

from ferrite.errors import Refusal
from ferrite.ir.index import Axis
from ferrite.ir.program import Reduce, Scan
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.stages import Stage, against_the_grain, in_pieces
from ferrite.schedule.gpu.blocks import whole_elements
from ferrite.schedule.gpu.kept_columns import can_keep_columns, is_column_piece
from ferrite.schedule.gpu.machine import GpuMachine

MAX_HELD_ELEMENTS = 1 << 12  # by one program at once, rows and columns
MAX_POINTS_OF_ONE_PROGRAM = 1 << 14  # so little work that one program does it as fast as many


def slower(group: Group, stage: Stage, rows: tuple[Axis, ...], machine: GpuMachine) -> Refusal | None:
    """Why the two together would run slower than one after the other."""
    stages = [*group.stages, stage]
    if any(is_ordered(each) for each in stages):
        return Refusal("points that may meet in memory are a kernel of their own")
    if len(rows) < len(group.rows) and only_reads_a_line(group, stage, machine):
        return Refusal("a few numbers are all that both read, and they have other rows")
    if max(each.points for each in stages) > MAX_POINTS_OF_ONE_PROGRAM:
        if needs_kept_columns(stages, rows):
            if can_keep_columns(stages, rows, machine):
                return None
            return Refusal("columns are reduced in pieces, which programs share")
        if rows != group.rows and any(each.inner(group.rows) and each.favourite in rows for each in group.stages):
            return Refusal("columns are reduced in pieces, which programs share")
        if in_pieces(stage, rows):
            return Refusal("columns are reduced in pieces, which programs share")
        count = math.prod(likely(row.extent) for row in rows)
        longest = max(each.points for each in stages) // max(count, 1)
        if count < machine.multiprocessors and longest > machine.one_program:
            return Refusal(f"only {count} rows in common" if rows else "no rows in common")
    if (column := kept_column(stages, rows)) is not None and can_keep_columns(stages, without(rows, column), machine):
        return None
    return against_the_grain(stages, rows)


def only_reads_a_line(group: Group, stage: Stage, machine: GpuMachine) -> bool:
    """Whether all that a stage has to do with a group is to read some tensors that are hardly there, as a learning rate
    is: one program would do both, one after the other."""
    pairs = [(access, other) for access in stage.accesses for other in group.accesses.get(access.storage, ())]
    if any(access.writes or other.writes for access, other in pairs):
        return False
    layouts = {access.storage: access.layout for access, _ in pairs}.values()
    return sum(math.prod(map(likely, each.sizes)) * each.dtype.itemsize for each in layouts) < machine.line


def needs_kept_columns(stages: list[Stage], rows: tuple[Axis, ...]) -> bool:
    """Whether some reduce columns that others go across, and a program cannot hold all of it."""
    columns = [is_column_piece(stage, rows) for stage in stages]
    if not any(columns) or all(columns):
        return False
    sizes = [whole_elements(stage.inner(rows)) for stage in stages]
    return any(size is None or size > MAX_HELD_ELEMENTS for size in sizes)


def kept_column(stages: list[Stage], rows: tuple[Axis, ...]) -> Axis | None:
    """The row that is a column of what some reduce and others go through element by element: then a program goes
    through whole rows, and keeps all columns."""
    if all(stage.reduced for stage in stages):
        return None
    found = {stage.favourite for stage in stages if stage.inner(rows)}
    column = found.pop() if len(found) == 1 else None
    if column is None or column not in rows:
        return None
    return column


def without(rows: tuple[Axis, ...], column: Axis) -> tuple[Axis, ...]:
    return tuple(row for row in rows if row is not column)


def is_ordered(stage: Stage) -> bool:
    return not isinstance(stage.operation, Reduce | Scan) and not all(item in stage.free for item in stage.axes)
