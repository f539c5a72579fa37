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

A tile of the result is summed up at once, so that each element that is loaded is used for several sums. All that
follows a sum element by element reads it from the block of sums, which is near, in vectors of its own. So its code is
there once, however many sums a tile has. Long sums are made of pieces, which the caches hold; how a sum is cut does not
depend on the number of threads, so results do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ferrite.ir import ONE, ZERO, Axis, Index, Load, Local, axis, const, index_value, minimum, number, op
from ferrite.ir.kernel import Accumulate, Join, Let, Loop, Scratch, State, Store, When
from ferrite.ir.program import Mode
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.cpu.products import (
    MAX_PACKED,
    MAX_PIECE,
    Form,
    Product,
    extent_of,
    factors,
    form_of,
    piece_of,
    step_along,
)
from ferrite.schedule.cpu.vectors import shared, vector_loop
from ferrite.schedule.loops.axes import Body, indices_at, nested, replaced
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.statements import Parts

SUMS, LEFT, RIGHT = "sums", "left", "right"  # the block of a result, and packed factors
TILE_ROWS = 4  # of a tile, or columns where vectors are made of rows: what a register holds is used so often
STEPS_AT_ONCE = 4  # of a sum, where vectors lie along the result: fewer branches, and registers enough
PRODUCTS_OF_AN_ADDITION = 2  # that take as long as one addition with its loads and stores


# --- tiles and blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Tiles of one size. `inside`: the places in one; `place`, `index`: where these are in the block of sums, and in
    the result; `tile`: the number of the tile in its block; `tiles`: the loop over the tiles of a block; `only_in`: the
    block that has any, where not all have."""

    inside: Axis
    place: Index
    index: Index
    tile: Index
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
            yield Part(inside, place, self.begin + place, tile, (tile,))
        if rest:
            inside, last = axis(f"{self.name}_last", rest), extent_of(self.block) - 1
            index = whole * self.tile + inside
            yield Part(inside, index - last * self.width, index, number(whole - last * self.tiles), (), last or None)

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
        tall, wide = TILE_ROWS, machine.registers // 2 // TILE_ROWS * lanes
    if form.along is product.rows:
        tall, wide = wide, tall
    most = machine.l2_bytes // (dtype.itemsize * MAX_PACKED) if form.packed else machine.block_rows
    tall_tiles = even_parts(-(-rows // tall), max(most // tall, 1))
    wide_tiles = even_parts(-(-columns // wide), max(machine.block_columns // wide, 1))
    blocks = math.prod(map(extent_of, product.batch)) * -(-rows // (tall * tall_tiles))
    while wide_tiles > 1 and blocks * -(-columns // (wide * wide_tiles)) < machine.product_blocks:
        if tall * tall_tiles * wide * wide_tiles * extent_of(product.summed) < 2 * machine.min_block_products:
            break
        wide_tiles = -(-wide_tiles // 2)
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
    follows: Body = (
        Let(tiles.total.name, Load.intern(SUMS, (tiles.rows.within, tiles.columns.within), tiles.total.dtype)),
        *parts[0].after,
        *(statement for part in parts[1:] for statement in part.point),
    )
    return tiles.packed_loops(follows) if form.packed else tiles.plain_loops(follows)


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
        return piece_of(extent_of(self.product.summed), MAX_PACKED if self.form.packed else MAX_PIECE)

    @property
    def pieces(self) -> Axis:
        return axis("piece", extent_of(self.product.summed) // self.piece)

    @property
    def piece_begin(self) -> Index:
        return ZERO if self.pieces.extent is ONE else self.pieces * self.piece

    def tile(self, tall: Part, wide: Part, join: Body) -> Body:
        """The sums of one tile; `join`: what joins each, over the places in a piece."""
        state = Accumulate((self.state,), self.summed(join))
        body: Body = (state, Store(SUMS, (tall.place, wide.place), self.total, self.mode))
        if self.form.along is self.product.columns:
            return self.rows.tiled(tall, self.columns.tiled(wide, body))
        return self.columns.tiled(wide, self.rows.tiled(tall, body))

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
        """A block of the result: its sums, and what follows them."""
        begins = {self.product.rows: self.rows, self.product.columns: self.columns}
        follows = replaced(follows, {item: side.begin + side.within for item, side in begins.items()})
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

    # --- factors as they are ------------------------------------------------------------------------------------------

    def plain_loops(self, follows: Body) -> Body:
        sums: Body = ()
        for wide in self.columns.parts():
            for tall in self.rows.parts():
                place: dict[Axis, Index] = {
                    self.product.rows: tall.index,
                    self.product.columns: wide.index,
                    self.product.summed: self.piece_begin + self.place_in_piece,
                }
                tile = self.tile(tall, wide, replaced((self.join,), place))
                sums += self.columns.around(wide, self.rows.around(tall, tile))
        blocks = [*self.product.batch, self.rows.block, self.columns.block]
        return shared(longer_than_one(blocks), self.block(sums, follows), self.work, self.machine)

    # --- packed factors -----------------------------------------------------------------------------------------------

    def packed_loops(self, follows: Body) -> Body:
        """Rows are packed once for all blocks beside each other, columns once for all tiles above each other. Threads
        share the blocks of rows, or, where these are few, the blocks of columns beside each."""
        left, right = factors(self.product, self.join)
        pieces, tiles, piece = extent_of(self.pieces), number(self.rows.tiles), number(self.piece)
        sums: Body = ()
        for wide in self.columns.parts():
            panel = Scratch(RIGHT, right.dtype, (piece, number(self.columns.tile)))
            work = self.packing(panel, right, self.product.columns, wide, self.piece_begin, ())
            for tall in self.rows.parts():
                this_piece = ZERO if self.pieces.extent is ONE else self.pieces
                pair = (
                    Load.intern(LEFT, (this_piece, tall.tile, self.place_in_piece, tall.inside), left.dtype),
                    Load.intern(RIGHT, (self.place_in_piece, wide.inside), right.dtype),
                )
                tile = self.tile(tall, wide, (Join(self.join.state, (op("mul", *pair),)),))
                work += self.rows.around(tall, tile)
            sums += self.columns.around(wide, (panel, *work))
        outer = longer_than_one([*self.product.batch, self.rows.block])
        few = math.prod(map(extent_of, outer)) < self.machine.min_outer_blocks
        panels = Scratch(LEFT, left.dtype, (number(pieces), tiles, piece, number(self.rows.tile)))
        every = axis("every_piece", pieces)
        packs: Body = (panels,)
        for tall in self.rows.parts():
            pack = self.packing(panels, left, self.product.rows, tall, every * self.piece, (every, tall.tile))
            pack = (Loop(every, "serial", pack),)
            if few and tall.tiles:
                packs += shared(tall.tiles, pack, self.rows.tile * extent_of(self.product.summed), self.machine)
            else:
                packs += self.rows.around(tall, pack)
        blocks, block = longer_than_one([self.columns.block]), self.block(sums, follows)
        if few:
            return nested(outer, (*packs, *shared(blocks, block, self.work, self.machine)), "serial")
        amount = self.work * extent_of(self.columns.block)
        return shared(outer, (*packs, *nested(blocks, block, "serial")), amount, self.machine)

    def packing(
        self, panel: Scratch, factor: Load, item: Axis, part: Part, begin: Index, place: tuple[Index, ...]
    ) -> Body:
        """Copy what a tile needs of a factor in a piece of its sums: step by step, all of the tile side by side."""
        step, lanes = axis("packed", self.piece), self.machine.lanes(factor.dtype)
        new: dict[Axis, Index] = {item: part.index, self.product.summed: begin + step}
        copy = replaced((Store(panel.name, (*place, step, part.inside), factor),), new)
        if step_along(factor, item) is not ONE and step_along(factor, self.product.summed) is ONE:
            # squares of as many lanes, which are turned around in registers
            return (Loop(part.inside, "vector", (Loop(step, "vector", copy, lanes),), copies=lanes),)
        return (Loop(step, "serial", (Loop(part.inside, "vector", copy, lanes, STEPS_AT_ONCE),)),)


def longer_than_one(axes: Sequence[Axis]) -> list[Axis]:
    return [item for item in axes if item.extent is not ONE]
