"""Where a group keeps what only it needs: as values, in a tile of scratch for each row, or in memory after all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ferrite.ir import Axis, Index, Load, Masked, flat_extent, flat_place, inside_in_loops, nodes_of
from ferrite.ir.kernel import Scratch
from ferrite.ir.program import Reduce, Scan, roots_of
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, axes_in, is_one
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.fusion.nests import Nest


@dataclass(frozen=True)
class RowTile:
    """The part of a buffer that one row has: some of its dimensions."""

    name: str
    dimensions: tuple[int, ...]
    sizes: tuple[Index, ...]
    scratch: Scratch

    def coordinates(self, whole: Sequence[Index]) -> tuple[Index, ...]:
        """Tiles are flat, so that loops over several of their dimensions can be collapsed into one."""
        return (flat_place([whole[place] for place in self.dimensions], self.sizes),)


@dataclass(frozen=True)
class _Use:
    nest: int
    member: Member
    access: MemoryAccess

    @property
    def is_guarded(self) -> bool:
        """Whether it is a read that is made only where a mask says so."""
        masked = [item.value for item in nodes_of(*roots_of(self.member.operation)) if isinstance(item, Masked)]
        mine = self.access.buffer, self.access.coordinates
        return any(isinstance(item, Load) and (item.buffer, item.coordinates) == mine for item in nodes_of(*masked))

    @property
    def is_result(self) -> bool:
        return self.access.writes and isinstance(self.member.operation, Reduce | Scan)


class Placement:
    """`values`: storages that need no memory at all; `tiles`: those that need scratch. All others are in memory."""

    def __init__(
        self,
        nests: Sequence[Nest],
        rows: Sequence[Axis],
        inside: Iterable[str],
        buffer_table: BufferTable,
        room: int,
    ) -> None:
        self.nests, self.rows, self.buffer_table = nests, rows, buffer_table
        self.uses: dict[str, list[_Use]] = {}
        for place, nest in enumerate(nests):
            for member in nest.members:
                for access in member.accesses:
                    self.uses.setdefault(access.storage, []).append(_Use(place, member, access))
        self.values: set[str] = set()
        self.tiles: dict[str, RowTile] = {}
        self.room = room  # bytes that tiles may take together
        for storage in inside:
            if self.is_value(storage):
                self.values.add(storage)
            elif (tile := self.tile(storage)) is not None:
                size = tile_bytes(tile)
                if size is not None and size <= self.room:
                    self.tiles[storage] = tile
                    self.room -= size

    def is_value(self, storage: str) -> bool:
        """Whether every reader can be handed the value itself."""
        writes = [use for use in self.uses[storage] if use.access.writes]
        if len(writes) != 1 or writes[0].access.mode != "set":
            return False
        (write,) = writes
        loads = [use for use in self.uses[storage] if not use.access.writes]
        return all(load.access.place is write.access.place and self.reaches(write, load) for load in loads)

    def reaches(self, write: _Use, load: _Use) -> bool:
        if load.nest == write.nest:
            return not write.is_result
        return load.nest > write.nest and self.once_a_row(write)

    def once_a_row(self, write: _Use) -> bool:
        """Whether a value is made once in every row, so that what follows in the row can use it."""
        nest = self.nests[write.nest]
        if nest.ordered or not axes_in(write.access.place) <= set(self.rows):
            return False
        return nest.once_a_row or (isinstance(write.member.operation, Reduce) and not nest.outer)

    def tile(self, storage: str) -> RowTile | None:
        buffer = self.buffer_table.buffers[storage]
        accesses = [use.access for use in self.uses[storage]]
        if any(access.buffer != storage for access in accesses):
            return None
        wanted = {row for row in self.rows if not is_one(row)}
        by_row: set[int] = set()
        for place in range(len(buffer.sizes)):
            found = {access.coordinates[place] for access in accesses}
            if len(found) == 1 and (one := found.pop()) in wanted:
                by_row.add(place)
                wanted.discard(one)
        if wanted:
            return None
        rest = tuple(place for place in range(len(buffer.sizes)) if place not in by_row)
        sizes = tuple(buffer.sizes[place] for place in rest)
        if any(size.high is None for size in sizes):
            return None
        name = f"{storage}_row"
        tile = RowTile(name, rest, sizes, Scratch(name, buffer.dtype, (flat_extent(sizes),)))
        return tile if all(is_inside(tile, use) for use in self.uses[storage]) else None


def is_inside(tile: RowTile, use: _Use) -> bool:
    """Whether an access can be shown to be inside of a tile, as a law of kernels wants it: `x[:, ::step]` reads places
    of a row that sizes alone tell nothing of where the step is any number. Memory has room for whatever is there."""
    (index,), (size,) = tile.coordinates(use.access.coordinates), tile.scratch.sizes
    return (index.fixed and size.fixed) or inside_in_loops(index, size) or use.is_guarded


def tile_bytes(tile: RowTile) -> int | None:
    highs = [size.high for size in tile.scratch.sizes]
    if any(high is None for high in highs):
        return None
    return math.prod((high for high in highs if high is not None), start=tile.scratch.dtype.itemsize)
