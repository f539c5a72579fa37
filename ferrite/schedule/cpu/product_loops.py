"""The loops of a matrix product: blocks for caches and threads, tiles for registers.

    for b in parallel(8):                                       a block of the result: some rows, some columns
        sums = scratch(f32, [128, 96])
        for column_tile in serial(16):
            for row_tile in serial(32):
                for column_in in vector(6, copies=6):           a tile: as many sums as registers hold
                    for row_in in vector(4, copies=4):
                        with sum(f32) as total:
                            for k in reduction(768, lanes=4): ...
                        sums[4*row_tile + row_in, 6*column_tile + column_in] = total
        for row in serial(128):
            for column in vector(96, lanes=4): ...              what follows: a bias, an activation, a residual, stores

A tile of the result is summed up at once, so that each element that is loaded is used for several sums. What follows a
sum element by element is done in the tile where that is little and the sum is whole. Otherwise it reads the sum from
the block of sums, which is near, in vectors of its own, so that its code is there once, however many sums a tile has.
Long sums are made of pieces, which the caches hold; how a sum is cut does not depend on the number of threads, so
results do not either.

Factors that are packed lie in panels: of one tile, step by step. A factor that several blocks need is packed before
them, by all threads, if it is not too large. Otherwise each block packs what it needs, which is then still near.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ferrite.ir import ONE, ZERO, Axis, Index, Load, Local, axis, const, index_value, minimum, number, op
from ferrite.ir.kernel import Accumulate, Join, Let, Loop, LoopKind, Scratch, State, Store, When
from ferrite.ir.program import Mode
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.cpu.products import (
    MAX_PACKED,
    MAX_PIECE,
    Form,
    extent_of,
    factors,
    form_of,
    piece_of,
    step_along,
)
from ferrite.schedule.cpu.vectors import shared, vector_loop
from ferrite.schedule.fusion.accesses import step_of
from ferrite.schedule.loops.axes import Body, indices_at, nested, replaced, work_of
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.products import Product
from ferrite.schedule.loops.statements import Parts

SUMS, LEFT, RIGHT = "sums", "left", "right"  # the block of a result, and packed factors
TILE_ROWS = 4  # of a tile, or columns where vectors are made of rows: what a register holds is used so often
STEPS_AT_ONCE = 4  # of a sum, where vectors lie along the result: fewer branches, and registers enough
PRODUCTS_OF_AN_ADDITION = 2  # that take as long as one addition with its loads and stores


# --- tiles and blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Tiles of one size. `inside`: the places in one; `place`, `index`: where these are in the block of sums, and in
    the result; `tile`, `number`: the number of the tile in its block, and in all; `tiles`: the loop over the tiles of a
    block; `only_in`: the block that has any, where not all have."""

    inside: Axis
    place: Index
    index: Index
    tile: Index
    number: Index
    tiles: tuple[Axis, ...] = ()
    only_in: int | None = None


@dataclass(frozen=True)
class Side:
    """Rows or columns of a result, in tiles of so many, which are in blocks. The last tile may have fewer, and so may
    the last block. `lanes`: of them in a vector."""

    name: str
    extent: int
    tile: int
    tiles: int
    lanes: int = 1

    @property
    def width(self) -> int:
        """Of a block."""
        return self.tile * self.tiles

    @property
    def block(self) -> Axis:
        return axis(f"{self.name}_block", -(-self.extent // self.width))

    @property
    def in_one_block(self) -> Side:
        return replace(self, tiles=-(-self.extent // self.tile))

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
        whole, rest = divmod(self.extent, self.tile)
        if whole:
            inside = axis(f"{self.name}_in", self.tile)
            tile = axis(f"{self.name}_tile", minimum(self.tiles, whole - self.this_block * self.tiles))
            place = tile * self.tile + inside
            yield Part(inside, place, self.begin + place, tile, self.this_block * self.tiles + tile, (tile,))
        if rest:
            inside, last = axis(f"{self.name}_last", rest), extent_of(self.block) - 1
            in_block = whole - last * self.tiles
            place = in_block * self.tile + inside
            yield Part(inside, place, self.begin + place, number(in_block), number(whole), (), last or None)

    def around(self, part: Part, body: Body) -> Body:
        """Loops over the tiles of a part around what is done for one."""
        body = nested(part.tiles, body, "serial")
        if part.only_in is None:
            return body
        is_there = op("eq", index_value(self.block), const(part.only_in, torch.int64), dtype=torch.bool)
        return (When(is_there, body),)

    def tiled(self, part: Part, body: Body) -> Body:
        """All that a tile has of this side, at once."""
        return (Loop(part.inside, "vector", body, self.lanes, self.tile // self.lanes),)


class Packed(enum.Enum):
    """Where a factor is packed: nowhere, before all blocks, or in each block that needs it."""

    NOWHERE = enum.auto()
    BEFORE = enum.auto()
    HERE = enum.auto()


def even_parts(count: int, most: int) -> int:
    """How many of so many things a part has, where none has more than `most` and all have about as many."""
    return -(-count // -(-count // most))


def sides_of(product: Product, form: Form, dtype: torch.dtype, machine: Machine) -> tuple[Side, Side]:
    """Tiles for the registers, blocks for the caches and for threads."""
    rows, columns = extent_of(product.rows), extent_of(product.columns)
    lanes = machine.lanes(dtype)
    if form.along is product.summed:
        tall = min(rows, TILE_ROWS)
        wide = min(columns, machine.registers * 3 // 4 // tall, 2 * TILE_ROWS)
    else:
        tall, vectors = machine.product_tile
        wide = form.panel or vectors * lanes
    if form.along is product.rows:
        tall, wide = wide, tall
    most = machine.l2_bytes // (dtype.itemsize * MAX_PACKED) if form.is_packed else machine.block_rows
    tall_tiles = even_parts(-(-rows // tall), max(most // tall, 1))
    wide_tiles = even_parts(-(-columns // wide), max(machine.block_columns // wide, 1))
    batch = math.prod(map(extent_of, product.batch))

    def are_few() -> bool:
        blocks = batch * -(-rows // (tall * tall_tiles)) * -(-columns // (wide * wide_tiles))
        work = tall * tall_tiles * wide * wide_tiles * extent_of(product.summed)
        return blocks < machine.product_blocks and work >= 2 * machine.min_block_products

    while wide_tiles > 1 and are_few():
        wide_tiles = -(-wide_tiles // 2)
    while tall_tiles > 1 and form.is_packed and are_few():
        tall_tiles = -(-tall_tiles // 2)
    return (
        Side("row", rows, tall, tall_tiles, lanes if form.along is product.rows else 1),
        Side("column", columns, wide, wide_tiles, lanes if form.along is product.columns else 1),
    )


# --- loops ------------------------------------------------------------------------------------------------------------


def product_loops(product: Product, parts: Sequence[Parts], machine: Machine) -> Body:
    """The whole body of the kernel; `parts`: the sum, and what follows it at every point of the result."""
    (state,), (join,) = parts[0].states, parts[0].point
    assert isinstance(join, Join)
    form = form_of(product, join, machine)
    tiles = Tiles(product, form, *sides_of(product, form, state.dtypes[0], machine), state, join, machine)
    follows = (*parts[0].after, *(statement for part in parts[1:] for statement in part.point))
    return tiles.loops(follows)


@dataclass(frozen=True)
class Tiles:
    product: Product
    form: Form
    rows: Side
    columns: Side
    state: State
    join: Join
    machine: Machine

    @property
    def total(self) -> Local:
        return Local.intern(self.state.names[0], self.state.dtypes[0])

    # --- sums ---------------------------------------------------------------------------------------------------------

    @property
    def piece(self) -> int:
        return piece_of(extent_of(self.product.summed), MAX_PACKED if self.form.is_packed else MAX_PIECE)

    @property
    def pieces(self) -> Axis:
        return axis("piece", extent_of(self.product.summed) // self.piece)

    @property
    def piece_begin(self) -> Index:
        return ZERO if self.pieces.extent is ONE else self.pieces * self.piece

    def tile(self, tall: Part, wide: Part, join: Body, follows: Body) -> Body:
        """The sums of one tile; `join`: what joins each, over the places in a piece."""
        body: Body = (Accumulate((self.state,), self.summed(join)),)
        if self.ends_in_tiles(follows):
            body += replaced(follows, {self.product.rows: tall.index, self.product.columns: wide.index})
        else:
            body += (Store(SUMS, (tall.place, wide.place), self.total, self.mode),)
        if self.form.along is self.product.columns:
            return self.rows.tiled(tall, self.columns.tiled(wide, body))
        return self.columns.tiled(wide, self.rows.tiled(tall, body))

    def ends_in_tiles(self, follows: Body) -> bool:
        """Whether what follows a sum is done where the sum is, in registers: it is little, and goes along vectors."""
        if self.pieces.extent is not ONE or work_of(follows) > self.machine.light_point_additions:
            return False
        stores = [item for item in follows if isinstance(item, Store)]
        return all(step_of(index, self.form.along) is ONE for item in stores for index in item.coordinates)

    def summed(self, join: Body) -> Body:
        """The loop of a tile over a piece of what is summed."""
        inside = self.place_in_piece
        if self.form.along is self.product.summed:
            return (Loop(inside, "reduction", join, min(self.machine.lanes(self.total.dtype), self.piece)),)
        if self.piece % STEPS_AT_ONCE:
            return (Loop(inside, "serial", join),)
        steps, step = axis("steps", self.piece // STEPS_AT_ONCE), axis("step", STEPS_AT_ONCE)
        join = replaced(join, {inside: steps * STEPS_AT_ONCE + step})
        return (Loop(steps, "serial", (Loop(step, "unrolled", join),)),)

    @property
    def place_in_piece(self) -> Axis:
        return axis("summed", self.piece)

    @property
    def mode(self) -> Mode:
        return "set" if self.pieces.extent is ONE else "add"

    def in_pieces(self, body: Body) -> Body:
        """The sums of a block, piece by piece."""
        if self.pieces.extent is ONE:
            return body
        zero: Body = (Store(SUMS, (self.rows.within, self.columns.within), const(0, self.total.dtype)),)
        zeros = Loop(self.rows.within, "serial", (vector_loop(self.columns.within, zero, self.machine),))
        return (zeros, *nested([self.pieces], body, "serial"))

    def block(self, sums: Body, follows: Body) -> Body:
        """A block of the result: its sums, and what follows them, if that is not in the tiles."""
        if self.ends_in_tiles(follows):
            return sums
        begins = {self.product.rows: self.rows, self.product.columns: self.columns}
        follows = replaced(follows, {item: side.begin + side.within for item, side in begins.items()})
        place = (self.rows.within, self.columns.within)
        follows = (Let(self.total.name, Load.intern(SUMS, place, self.total.dtype)), *follows)
        memory = Scratch(SUMS, self.total.dtype, (number(self.rows.width), number(self.columns.width)))
        return (memory, *self.in_pieces(sums), *self.over_block(follows))

    def over_block(self, body: Body) -> Body:
        """Loops over all sums of a block, in the order of the memory that is accessed."""
        outer, last = ordered_axes([self.rows.within, self.columns.within], indices_at(body))
        return (Loop(outer, "serial", (vector_loop(last, body, self.machine),)),)

    @property
    def work(self) -> int:
        """Of a block, in additions."""
        return self.rows.width * self.columns.width * extent_of(self.product.summed) // PRODUCTS_OF_AN_ADDITION

    # --- blocks -------------------------------------------------------------------------------------------------------

    def loops(self, follows: Body) -> Body:
        """Threads share the blocks of the result. Where each block packs a left factor of its own, blocks beside each
        other are one thread's, which packs it once, unless there would be too little to share."""
        blocks = longer_than_one([*self.product.batch, self.rows.block, self.columns.block])
        rows = longer_than_one([*self.product.batch, self.rows.block])
        sums = self.sums(follows)
        if self.left is Packed.HERE:
            panels, *packs = self.packs(LEFT, self.product.rows, self.rows)
            if math.prod(map(extent_of, rows)) >= self.machine.min_outer_blocks:
                inner = nested(longer_than_one([self.columns.block]), self.block(sums, follows), "serial")
                work = self.work * extent_of(self.columns.block)
                return shared(rows, (panels, *packs, *inner), work, self.machine)
            return shared(blocks, (panels, *packs, *self.block(sums, follows)), self.work, self.machine)
        before: Body = ()
        if self.left is Packed.BEFORE:
            before += self.packs(LEFT, self.product.rows, self.rows.in_one_block, "parallel")
        if self.right is Packed.BEFORE:
            before += self.packs(RIGHT, self.product.columns, self.columns.in_one_block, "parallel")
        return (*before, *shared(blocks, self.block(sums, follows), self.work, self.machine))

    def sums(self, follows: Body) -> Body:
        """The tiles of a block, over a piece of what is summed."""
        found: Body = ()
        for wide in self.columns.parts():
            work: Body = ()
            if self.right is Packed.HERE:
                panel = Scratch(RIGHT, self.factors[1].dtype, (number(self.piece), number(self.columns.tile)))
                work = (panel, *self.packing(panel, self.product.columns, wide, self.piece_begin, ()))
            for tall in self.rows.parts():
                work += self.rows.around(tall, self.tile(tall, wide, self.joined(tall, wide), follows))
            found += self.columns.around(wide, work)
        return found

    def joined(self, tall: Part, wide: Part) -> Body:
        """What joins each sum of a tile: two elements, multiplied."""
        piece = ZERO if self.pieces.extent is ONE else self.pieces
        left, right = self.factors
        if self.left is not Packed.NOWHERE:
            tile = tall.tile if self.left is Packed.HERE else tall.number
            left = Load.intern(LEFT, (piece, tile, self.place_in_piece, tall.inside), left.dtype)
        if self.right is Packed.HERE:
            right = Load.intern(RIGHT, (self.place_in_piece, wide.inside), right.dtype)
        elif self.right is Packed.BEFORE:
            right = Load.intern(RIGHT, (piece, wide.number, self.place_in_piece, wide.inside), right.dtype)
        place: dict[Axis, Index] = {
            self.product.rows: tall.index,
            self.product.columns: wide.index,
            self.product.summed: self.piece_begin + self.place_in_piece,
        }
        return replaced((Join(self.join.state, (op("mul", left, right),)),), place)

    # --- packed factors -----------------------------------------------------------------------------------------------

    @cached_property
    def factors(self) -> tuple[Load, Load]:
        return factors(self.product, self.join)

    @cached_property
    def left(self) -> Packed:
        if not self.form.packs_left:
            return Packed.NOWHERE
        return Packed.BEFORE if self.can_be_shared(self.rows) else Packed.HERE

    @cached_property
    def right(self) -> Packed:
        if not self.form.packs_right:
            return Packed.NOWHERE
        is_shared = self.rows.block.extent is not ONE and self.can_be_shared(self.columns)
        return Packed.BEFORE if is_shared else Packed.HERE

    def can_be_shared(self, side: Side) -> bool:
        """Whether a factor is packed for all blocks: it is the same for all, and not too large."""
        size = side.extent * extent_of(self.product.summed) * self.total.dtype.itemsize
        return not longer_than_one(self.product.batch) and size <= self.machine.max_shared_panel_bytes

    def packs(self, name: str, item: Axis, side: Side, kind: LoopKind = "serial") -> Body:
        """Panels of all tiles of a block, and all pieces."""
        factor = self.factors[item is self.product.columns]
        pieces = axis("every_piece", extent_of(self.pieces))
        sizes = (pieces.extent, number(side.tiles), number(self.piece), number(side.tile))
        panels = Scratch(name, factor.dtype, sizes)
        body: Body = (panels,)
        this_piece = ZERO if pieces.extent is ONE else pieces
        for part in side.parts():
            pack = self.packing(panels, item, part, this_piece * self.piece, (this_piece, part.tile))
            loops = [*part.tiles, *longer_than_one([pieces])]
            if kind == "parallel" and loops:
                body += shared(loops, pack, side.tile * self.piece, self.machine)
            else:
                body += side.around(part, nested(longer_than_one([pieces]), pack, "serial"))
        return body

    def packing(self, panel: Scratch, item: Axis, part: Part, begin: Index, place: tuple[Index, ...]) -> Body:
        """Copy what a tile needs of a factor in a piece of its sums: step by step, all of the tile side by side."""
        factor = self.factors[item is self.product.columns]
        step, lanes = axis("packed", self.piece), self.machine.lanes(factor.dtype)
        new: dict[Axis, Index] = {item: part.index, self.product.summed: begin + step}
        copy = replaced((Store(panel.name, (*place, step, part.inside), factor),), new)
        if step_along(factor, item) is not ONE and step_along(factor, self.product.summed) is ONE:
            # squares of as many lanes, which are turned around in registers
            while extent_of(part.inside) < lanes and lanes > 2:
                lanes //= 2
            return (Loop(part.inside, "vector", (Loop(step, "vector", copy, lanes),), copies=lanes),)
        return (Loop(step, "serial", (Loop(part.inside, "vector", copy, lanes, STEPS_AT_ONCE),)),)


def longer_than_one(axes: Sequence[Axis]) -> list[Axis]:
    return [item for item in axes if item.extent is not ONE]
