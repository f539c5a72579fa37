"""Small kernels that would rather be one: to start a kernel and wait for its first loads takes two microseconds."""

from __future__ import annotations

from collections.abc import Hashable

from ferrite.ir.program import Compute, Reduce
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group, bytes_about
from ferrite.schedule.fusion.stages import Stage
from ferrite.schedule.gpu.kept_columns import MODES
from ferrite.schedule.gpu.machine import GpuMachine
from ferrite.schedule.gpu.profit import is_ordered

MAX_STAGES_BESIDE = 12  # in one kernel: they run one after the other in each program


def alike(group: Group, buffer_table: BufferTable, machine: GpuMachine) -> Hashable:
    """What two groups must have in common to be one kernel though they need nothing of each other; None for a group
    that is better alone. They have equal rows, go along memory in the same direction, and touch so little of it that
    starting them counts. Either all of it is elementwise, or all of it reduces columns: a row that is reduced is kept
    in registers, and two of them would not fit."""
    stages = group.stages
    if len(stages) > MAX_STAGES_BESIDE or any(is_ordered(stage) for stage in stages) or not group.rows:
        return None
    if all(isinstance(stage.operation, Compute) for stage in stages):
        kind = "elementwise"
    elif all(isinstance(stage.operation, Reduce) and is_across(stage, group) for stage in stages):
        kind = "columns"
    else:
        return None
    if sum(bytes_about(storage, buffer_table) for storage in group.accesses) > machine.small_bytes:
        return None
    inner = {tuple(item.extent for item in stage.inner(group.rows) if item not in stage.reduced) for stage in stages}
    directions = {group.rows.index(stage.favourite) if stage.favourite in group.rows else -1 for stage in stages}
    if len(directions) != 1:
        return None
    return kind, tuple(row.extent for row in group.rows), frozenset(inner), directions.pop()


def is_across(stage: Stage, group: Group) -> bool:
    operation = stage.operation
    assert isinstance(operation, Reduce)
    columns_alone = set(stage.inner(group.rows)) == set(operation.reduced)
    return operation.kind in MODES and columns_alone and stage.favourite in group.rows
