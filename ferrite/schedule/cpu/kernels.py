"""A group becomes a kernel: its nests, where its values live, its statements, the loops around them, its frame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferrite.ir import Load, indices_of, symbols_in
from ferrite.ir.index import Symbol
from ferrite.ir.kernel import Kernel, Pointer, Store, indices_in, nodes_in, walk
from ferrite.schedule.cpu.loops import Body
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.cpu.placement import Placement
from ferrite.schedule.cpu.prefetch import with_prefetches
from ferrite.schedule.cpu.ranges import parted
from ferrite.schedule.cpu.shapes import arranged
from ferrite.schedule.cpu.sharing import shared_tiles
from ferrite.schedule.cpu.sorted_scatter import sorted_scatter_of
from ferrite.schedule.cpu.statements import Statements
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.nests import nests_of
from ferrite.schedule.target import Built


def build(group: Group, inside: Iterable[str], buffer_table: BufferTable, machine: Machine) -> Built:
    """The kernel of a group; `inside`: storages that nothing else accesses."""
    nests = nests_of(group, buffer_table)
    stages = [stage for nest in nests for stage in nest.stages]
    scatter = sorted_scatter_of(stages, group.rows) if len(stages) == len(nests) else None
    if scatter is not None:  # a row of the table is complete before the next is begun: nothing needs a tile
        scatter, inside = replace(scatter, kept=scatter.table not in inside), ()
    placement = Placement(nests, group.rows, inside, buffer_table, machine.l2_bytes // 2)
    made = Statements(placement, buffer_table, group.rows)
    parts = [made.nest(nest) for nest in nests]
    tiles: Body = tuple(tile.scratch for tile in placement.tiles.values())
    if scatter is None:
        tiles += tuple(shared_tiles(nests, parts, placement.room, machine))
    body = parted(arranged(group.rows, tiles, nests, parts, machine, scatter), machine)
    needed = memory_of(body)
    pointers = tuple(item for item in pointers_of(made) if item.name in needed)
    body = with_prefetches(body, {item.name: item for item in pointers}, machine)
    return Built(Kernel(pointers, sizes_of(body), body, group.origins), tuple(item.name for item in pointers))


def pointers_of(made: Statements) -> tuple[Pointer, ...]:
    """What is written first; then in the order of first use, not of names: equal kernels want equal orders."""
    found = []
    for name in sorted(made.types, key=lambda name: name not in made.written):
        access = ("both" if name in made.read else "write") if name in made.written else "read"
        found.append(Pointer(name, made.types[name], access))  # type: ignore[arg-type]
    return tuple(found)


def memory_of(body: Body) -> set[str]:
    """The names of all memory that statements read or write."""
    found = {statement.buffer for statement in walk(body) if isinstance(statement, Store)}
    return found | {item.buffer for statement in walk(body) for item in nodes_in(statement) if isinstance(item, Load)}


def sizes_of(body: Body) -> tuple[Symbol, ...]:
    found: set[Symbol] = set()
    for statement in walk(body):
        for index in indices_in(statement):
            found.update(symbols_in(index))
        for item in nodes_in(statement):
            for index in indices_of(item):
                found.update(symbols_in(index))
    return tuple(sorted(found, key=lambda item: item.name))
