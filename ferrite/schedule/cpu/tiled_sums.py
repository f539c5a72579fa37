"""Sums in tiles, which are in blocks: what matrix products and convolutions have in common.

A convolution is a matrix product whose left factor is read through windows: a row is a place of the result, a column
one of its channels. Both have a block of sums, piece by piece of what is summed, and then what follows at every point.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ferrite.ir import ONE, ZERO, Axis, Index, Load, Local, Number, axis, const, index_value, minimum, number, op
from ferrite.ir.kernel import Let, Loop, Scratch, State, Store, Update, When, nodes_in
from ferrite.ir.program import Mode
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import vector_loop
from ferrite.schedule.fusion.accesses import step_of
from ferrite.schedule.loops.axes import Body, indices_at, nested, replaced
from ferrite.schedule.loops.memory_order import ordered_axes

SUMS, LEFT, RIGHT = "sums", "left", "right"  # the block of a result, and packed factors
STEPS_AT_ONCE = 4  # of a sum that are written out, where vectors lie along the result: a limit on code


@dataclass(frozen=True)
class Part:
    """Tiles of one size. `inside`: the places in one; `place`, `index`: where these are in the block of sums, and in
    the result; `tile`, `number`: the number of the tile in its block, and in all; `tiles`: the loop over the tiles of a
    block; `only_in`: the block that has any, where not all have; `first`: where the places begin in the tile, of one
    that is in several parts."""

    inside: Axis
    place: Index
    index: Index
    tile: Index
    number: Index
    tiles: tuple[Axis, ...] = ()
    only_in: Index | None = None
    first: Index = ZERO

    @property
    def in_tile(self) -> Index:
        return self.first + self.inside


@dataclass(frozen=True)
class Side:
    """Rows or columns of a result, in tiles of so many, which are in blocks. The last tile may have fewer, and so may
    the last block. `lanes`: of them in a vector. How many there are may be known at run time only."""

    name: str
    extent: Index
    tile: int
    tiles: int
    lanes: int = 1

    @property
    def width(self) -> int:
        """Of a block."""
        return self.tile * self.tiles

    @property
    def block(self) -> Axis:
        return axis(f"{self.name}_block", rounded_up(self.extent, self.width))

    @property
    def in_one_block(self) -> Side:
        """Of a side whose extent is known."""
        assert isinstance(self.extent, Number)
        return replace(self, tiles=-(-self.extent.value // self.tile))

    @property
    def this_block(self) -> Index:
        return ZERO if self.block.extent is ONE else self.block

    @property
    def begin(self) -> Index:
        """Where a block begins."""
        return self.this_block * self.width

    @property
    def within(self) -> Axis:
        """The places in a block."""
        return axis(self.name, minimum(self.width, self.extent - self.begin))

    def parts(self) -> Iterator[Part]:
        """The whole tiles, and what the last one has. Where that is not known, it is made of parts of one, two, four
        and so on, of which each is there or is not: code has tiles of known sizes, and few of them."""
        whole, rest = self.extent // self.tile, self.extent % self.tile
        if whole is not ZERO:
            inside = axis(f"{self.name}_in", self.tile)
            tile = axis(f"{self.name}_tile", minimum(self.tiles, whole - self.this_block * self.tiles))
            place = tile * self.tile + inside
            yield Part(inside, place, self.begin + place, tile, self.this_block * self.tiles + tile, (tile,))
        in_block, only_in = whole % self.tiles, None if self.block.extent is ONE else whole // self.tiles
        if isinstance(rest, Number):
            if rest is not ZERO:
                inside = axis(f"{self.name}_last", rest)
                place = in_block * self.tile + inside
                yield Part(inside, place, self.begin + place, in_block, whole, (), only_in)
            return
        size = 1 << (self.tile - 1).bit_length() - 1
        while size >= 1:
            inside, is_there = (
                axis(f"{self.name}_in_{size}", size),
                axis(f"{self.name}_{size}", rest % (2 * size) // size),
            )
            first = rest // (2 * size) * (2 * size)
            place = in_block * self.tile + first + inside
            yield Part(inside, place, self.begin + place, in_block, whole, (is_there,), only_in, first)
            size //= 2

    def around(self, part: Part, body: Body) -> Body:
        """Loops over the tiles of a part around what is done for one."""
        body = nested(part.tiles, body, "serial")
        if part.only_in is None:
            return body
        is_there = op("eq", index_value(self.block), index_value(part.only_in), dtype=torch.bool)
        return (When(is_there, body),)

    def tiled(self, part: Part, body: Body) -> Body:
        """All that a tile has of this side, at once."""
        return (Loop(part.inside, "vector", body, self.lanes, self.tile // self.lanes),)


def rounded_up(extent: Index, width: int) -> Index:
    """How many parts of a width there are."""
    return (extent + (width - 1)) // width


def even_parts(count: int, most: int) -> int:
    """How many of so many things a part has, where none has more than `most` and all have about as many."""
    return -(-count // -(-count // most))


def longer_than_one(axes: Sequence[Axis]) -> list[Axis]:
    return [item for item in axes if item.extent is not ONE]


# --- blocks of sums ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TiledSums(abc.ABC):
    """`state`, `update`: the sum, and what is added to it at every step."""

    rows: Side
    columns: Side
    state: State
    update: Update
    machine: Machine

    @property
    @abc.abstractmethod
    def summed_products(self) -> int:
        """How many products one sum is of."""

    @property
    @abc.abstractmethod
    def pieces(self) -> Axis:
        """The pieces of what is summed."""

    @abc.abstractmethod
    def in_result(self, row: Index, column: Index) -> dict[Axis, Index]:
        """Where a row and a column are in the result."""

    @property
    def total(self) -> Local:
        return Local.intern(self.state.names[0], self.state.dtypes[0])

    @property
    def mode(self) -> Mode:
        """How a piece of a sum is stored."""
        return "set" if self.pieces.extent is ONE else "add"

    @property
    def work(self) -> int:
        """Of a block, in additions."""
        return self.rows.width * self.columns.width * self.summed_products // self.machine.products_of_an_addition

    def block(self, sums: Body, follows: Body) -> Body:
        """A block of the result: its sums, piece by piece, and what follows them."""
        here = self.in_result(self.rows.begin + self.rows.within, self.columns.begin + self.columns.within)
        total = Load.intern(SUMS, (self.rows.within, self.columns.within), self.total.dtype)
        follows = (Let(self.total.name, total), *replaced(follows, here))
        memory = Scratch(SUMS, self.total.dtype, (number(self.rows.width), number(self.columns.width)))
        return (memory, *self.in_pieces(sums), *self.over_block(follows))

    def in_pieces(self, body: Body) -> Body:
        """The sums of a block, piece by piece."""
        if self.pieces.extent is ONE:
            return body
        zero: Body = (Store(SUMS, (self.rows.within, self.columns.within), const(0, self.total.dtype)),)
        zeros = Loop(self.rows.within, "serial", (vector_loop(self.columns.within, zero, self.machine),))
        return (zeros, *nested([self.pieces], body, "serial"))

    def over_block(self, body: Body) -> Body:
        """Loops over all sums of a block, in the order of the memory that is accessed. Where all of that lies along the
        rows, but for the sums, squares of as many lanes are turned around in registers."""
        row, column = self.rows.within, self.columns.within
        outer, last = ordered_axes([row, column], indices_at(body))
        if last is column or not only_sums_go_across(row, body):
            return (Loop(outer, "serial", (vector_loop(last, body, self.machine),)),)
        lanes = self.machine.lanes(self.total.dtype)
        several = STEPS_AT_ONCE * lanes  # side by side, so that lines of the cache with sums are read whole
        strips = axis("strip", (column.extent + (several - 1)) // several)
        inside = axis("strip_in", minimum(several, column.extent - strips * several))
        body = replaced(body, {column: strips * several + inside})
        square = Loop(row, "vector", (Loop(inside, "vector", body, lanes),), copies=lanes)
        return (Loop(strips, "serial", (square,)),)


def only_sums_go_across(row: Axis, body: Body) -> bool:
    """Whether all that is accessed lies along a row, or is the same for all of it, but for the sums."""
    if not all(isinstance(statement, Let | Store) for statement in body):
        return False
    loads = {item for statement in body for item in nodes_in(statement) if isinstance(item, Load)}
    stores = [index for item in body if isinstance(item, Store) for index in item.coordinates]
    others = [index for item in loads if item.buffer != SUMS for index in item.coordinates]
    return all(step_of(index, row) is ONE for index in stores) and all(step_of(index, row) is ZERO for index in others)
