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
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ferrite.ir import ONE, ZERO, Axis, Expr, Index, Load, Number, Op, axis, number, op, substitute, sum_pieces
from ferrite.ir.kernel import Accumulate, Loop, LoopKind, Prefetch, Scratch, Store, Update
from ferrite.machines import Machine
from ferrite.schedule.cpu.products import (
    ProductForm,
    extent_of,
    factors,
    form_of,
    load_of,
    step_along,
)
from ferrite.schedule.cpu.tiled_sums import (
    LEFT,
    RIGHT,
    STEPS_AT_ONCE,
    SUMS,
    Part,
    Side,
    TiledSums,
    even_parts,
    longer_than_one,
)
from ferrite.schedule.cpu.vectors import shared
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of
from ferrite.schedule.loops.axes import Body, nested, replaced, work_of
from ferrite.schedule.loops.products import ProductAxes
from ferrite.schedule.loops.statements import Parts


class Packed(enum.Enum):
    """Where a factor is packed: nowhere, before all blocks, or in each block that needs it."""

    NOWHERE = enum.auto()
    BEFORE = enum.auto()
    HERE = enum.auto()


def sides_of(product: ProductAxes, form: ProductForm, dtype: torch.dtype, machine: Machine) -> tuple[Side, Side]:
    """Tiles for the registers, blocks for the caches and for threads."""
    rows, columns = likely(product.rows.extent), extent_of(product.columns)
    lanes = machine.lanes(dtype)
    if form.along is product.summed:
        tall, most = machine.dot_tile(rows if isinstance(product.rows.extent, Number) else sys.maxsize)
        most = machine.columns_read_once if form.reads_once else most
        wide = min(columns, most)
    else:
        tall, _ = machine.product_tile
        wide = form.panel or machine.panel_columns(dtype)
    if form.along is product.rows:
        tall, wide = wide, tall
    most = machine.l2_bytes // (dtype.itemsize * sum_pieces.MAX_PACKED) if form.is_packed else machine.block_rows
    tall_tiles = even_parts(-(-rows // tall), max(most // tall, 1))
    together = machine.lanes(dtype) if form.reads_once else machine.block_columns
    wide_tiles = even_parts(-(-columns // wide), max(together // wide, 1))
    batch = likely_points(product.batch)

    def are_few() -> bool:
        blocks = batch * -(-rows // (tall * tall_tiles)) * -(-columns // (wide * wide_tiles))
        work = tall * tall_tiles * wide * wide_tiles * extent_of(product.summed)
        return blocks < machine.product_blocks and work >= 2 * machine.min_block_products

    while wide_tiles > 1 and are_few():
        wide_tiles = -(-wide_tiles // 2)
    while tall_tiles > 1 and form.is_packed and are_few():
        tall_tiles = -(-tall_tiles // 2)
    return (
        Side("row", product.rows.extent, tall, tall_tiles, lanes if form.along is product.rows else 1),
        Side("column", product.columns.extent, wide, wide_tiles, lanes if form.along is product.columns else 1),
    )


# --- loops ------------------------------------------------------------------------------------------------------------


def product_loops(product: ProductAxes, parts: Sequence[Parts], machine: Machine) -> Body:
    """The whole body of the kernel; `parts`: the sum, and what follows it at every point of the result."""
    (state,), (update,) = parts[0].states, parts[0].point
    assert isinstance(update, Update)
    form = form_of(product, update, machine)
    tiles = ProductTiles(*sides_of(product, form, state.dtypes[0], machine), state, update, machine, product, form)
    follows = (*parts[0].after, *(statement for part in parts[1:] for statement in part.point))
    return tiles.loops(follows)


@dataclass(frozen=True)
class ProductTiles(TiledSums):
    product: ProductAxes
    form: ProductForm

    def in_result(self, row: Index, column: Index) -> dict[Axis, Index]:
        return {self.product.rows: row, self.product.columns: column}

    # --- sums ---------------------------------------------------------------------------------------------------------

    @property
    def summed_products(self) -> int:
        return extent_of(self.product.summed)

    @property
    def piece(self) -> int:
        return sum_pieces.of_product(self.summed_products, self.form.is_packed)

    @property
    def pieces(self) -> Axis:
        return axis("piece", self.summed_products // self.piece)

    @property
    def piece_begin(self) -> Index:
        return ZERO if self.pieces.extent is ONE else self.pieces * self.piece

    def tile(self, tall: Part, wide: Part, update: Body, follows: Body) -> Body:
        """The sums of one tile; `update`: of each, over the places in a piece."""
        body: Body = (Accumulate((self.state,), self.summed((*self.prefetches(wide), *update))),)
        if self.ends_in_tiles(follows):
            body += replaced(follows, self.in_result(tall.index, wide.index))
        else:
            body += (Store(SUMS, (tall.place, wide.place), self.total, self.mode),)
        if self.form.along is self.product.columns:
            return self.rows.tiled(tall, self.columns.tiled(wide, body))
        return self.columns.tiled(wide, self.rows.tiled(tall, body))

    def prefetches(self, wide: Part) -> Body:
        """Of a row times a matrix that comes from memory: what the next columns will read at the same step. A processor
        sees where a column goes on, but not where the next ones begin."""
        right = load_of(self.factors[1])
        size = extent_of(self.product.columns) * self.summed_products * self.factors[1].dtype.itemsize
        is_far = self.machine.asks_for_next_columns and size >= self.machine.l2_bytes
        if self.product.rows.extent is not ONE or not self.form.reads_once or not is_far:
            return ()
        place: dict[Axis, Index] = self.in_result(ZERO, wide.index + self.columns.tile)
        place[self.product.summed] = self.piece_begin + self.place_in_piece
        return (Prefetch(right.buffer, tuple(substitute(index, place) for index in right.coordinates)),)

    def ends_in_tiles(self, follows: Body) -> bool:
        """Whether what follows a sum is done where the sum is, in registers: it is little, and goes along vectors."""
        if self.pieces.extent is not ONE or work_of(follows) > self.machine.light_point_additions:
            return False
        stores = [item for item in follows if isinstance(item, Store)]
        return all(step_of(index, self.form.along) is ONE for item in stores for index in item.coordinates)

    def summed(self, update: Body) -> Body:
        """The loop of a tile over a piece of what is summed."""
        inside = self.place_in_piece
        if self.form.along is self.product.summed:
            return (Loop(inside, "reduction", update, min(self.machine.lanes(self.total.dtype), self.piece)),)
        if self.piece % STEPS_AT_ONCE:
            return (Loop(inside, "serial", update),)
        steps, step = axis("steps", self.piece // STEPS_AT_ONCE), axis("step", STEPS_AT_ONCE)
        update = replaced(update, {inside: steps * STEPS_AT_ONCE + step})
        return (Loop(steps, "serial", (Loop(step, "unrolled", update),)),)

    @property
    def place_in_piece(self) -> Axis:
        return axis("summed", self.piece)

    def block(self, sums: Body, follows: Body) -> Body:
        """The same, unless what follows is in the tiles."""
        return sums if self.ends_in_tiles(follows) else super().block(sums, follows)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def loops(self, follows: Body) -> Body:
        """Threads share the blocks of the result. Where each block packs a left factor of its own, blocks beside each
        other are one thread's, which packs it once, unless there would be too little to share."""
        blocks = longer_than_one([*self.product.batch, self.rows.block, self.columns.block])
        rows = longer_than_one([*self.product.batch, self.rows.block])
        sums = self.sums(follows)
        before: Body = ()
        if self.left is Packed.BEFORE:
            before += self.packs(LEFT, self.product.rows, self.rows.in_one_block, "parallel")
        if self.right is Packed.BEFORE:
            before += self.packs(RIGHT, self.product.columns, self.columns.in_one_block, "parallel")
        if self.left is not Packed.HERE:
            return (*before, *shared(blocks, self.block(sums, follows), self.work, self.machine))
        panels, *packs = self.packs(LEFT, self.product.rows, self.rows)
        if likely_points(rows) < self.machine.min_outer_blocks:
            block = (panels, *packs, *self.block(sums, follows))
            return (*before, *shared(blocks, block, self.work, self.machine))
        inner = nested(longer_than_one([self.columns.block]), self.block(sums, follows), "serial")
        work = self.work * extent_of(self.columns.block)
        return (*before, *shared(rows, (panels, *packs, *inner), work, self.machine))

    def sums(self, follows: Body) -> Body:
        """The tiles of a block, over a piece of what is summed."""
        found: Body = ()
        for wide in self.columns.parts():
            work: Body = ()
            if self.right is Packed.HERE:
                panel = Scratch(RIGHT, self.factors[1].dtype, (number(self.piece), number(self.columns.tile)))
                work = (panel, *self.packing(panel, self.product.columns, wide, self.piece_begin, ()))
            for tall in self.rows.parts():
                work += self.rows.around(tall, self.tile(tall, wide, self.update_of(tall, wide), follows))
            found += self.columns.around(wide, work)
        return found

    def update_of(self, tall: Part, wide: Part) -> Body:
        """The update of each sum of a tile: by two elements, multiplied."""
        piece = ZERO if self.pieces.extent is ONE else self.pieces
        left, right = self.factors
        if self.left is not Packed.NOWHERE:
            tile = tall.tile if self.left is Packed.HERE else tall.number
            left = Load.intern(LEFT, (piece, tile, self.place_in_piece, tall.in_tile), left.dtype)
        if self.right is Packed.HERE:
            right = Load.intern(RIGHT, (self.place_in_piece, wide.inside), right.dtype)
        elif self.right is Packed.BEFORE:
            right = Load.intern(RIGHT, (piece, wide.number, self.place_in_piece, wide.inside), right.dtype)
        place = self.in_result(tall.index, wide.index)
        place[self.product.summed] = self.piece_begin + self.place_in_piece
        (value,) = self.update.values
        assert isinstance(value, Op)
        pair = (left, right) if value.operands[0] is self.factors[0] else (right, left)
        return replaced((Update(self.update.state, (op(value.name, *pair),)),), place)

    # --- packed factors -----------------------------------------------------------------------------------------------

    @cached_property
    def factors(self) -> tuple[Expr, Expr]:
        return factors(self.product, self.update)

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
        if not isinstance(side.extent, Number):
            return False
        size = side.extent.value * self.summed_products * self.total.dtype.itemsize
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
        copy = replaced((Store(panel.name, (*place, step, part.in_tile), factor),), new)
        if step_along(factor, item) is not ONE and step_along(factor, self.product.summed) is ONE:
            # squares of as many lanes, which are turned around in registers
            while extent_of(part.inside) < lanes and lanes > 2:
                lanes //= 2
            return (Loop(part.inside, "vector", (Loop(step, "vector", copy, lanes),), copies=lanes),)
        return (Loop(step, "serial", (Loop(part.inside, "vector", copy, lanes, STEPS_AT_ONCE),)),)
