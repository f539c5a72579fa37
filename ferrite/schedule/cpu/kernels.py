"""A group becomes a kernel: its nests, where its values live, its statements, the loops around them, its frame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferrite.ir.kernel import Kernel
from ferrite.ir.program import Attention
from ferrite.machines import Machine
from ferrite.schedule.cpu.attention import attention_kernel
from ferrite.schedule.cpu.common_values import shared_tiles
from ferrite.schedule.cpu.prefetch import with_prefetches
from ferrite.schedule.cpu.shapes import arranged
from ferrite.schedule.cpu.sorted_scatter import sorted_scatter_of
from ferrite.schedule.cpu.split_loops import parted
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.nests import nests_of
from ferrite.schedule.loops.axes import Body
from ferrite.schedule.loops.frame import pointers_of, sizes_of
from ferrite.schedule.loops.placement import Placement
from ferrite.schedule.loops.statements import LoopStatements
from ferrite.schedule.target import BuiltKernel


def build(group: Group, inside: Iterable[str], buffer_table: BufferTable, machine: Machine) -> BuiltKernel:
    """The kernel of a group; `inside`: storages that nothing else accesses."""
    if isinstance(group.members[0].operation, Attention):
        return attention_kernel(group, buffer_table, machine)
    nests = nests_of(group, buffer_table)
    members = [member for nest in nests for member in nest.members]
    scatter = sorted_scatter_of(members, group.rows, machine) if len(members) == len(nests) else None
    if scatter is not None:  # a row of the table is complete before the next is begun: nothing needs a tile
        scatter, inside = replace(scatter, kept=scatter.table not in inside), ()
    placement = Placement(nests, group.rows, inside, buffer_table, machine.l2_bytes // 2)
    made = LoopStatements(placement, buffer_table, group.rows)
    parts = [made.nest(nest) for nest in nests]
    tiles: Body = tuple(tile.scratch for tile in placement.tiles.values())
    if scatter is None:
        tiles += tuple(shared_tiles(nests, parts, placement.room, machine))
    body = parted(arranged(group.rows, tiles, nests, parts, machine, scatter), machine)
    pointers = pointers_of(made, body)
    body = with_prefetches(body, {item.name: item for item in pointers}, machine)
    return BuiltKernel(Kernel(pointers, sizes_of(body), body, group.origins), tuple(item.name for item in pointers))
