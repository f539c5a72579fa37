"""The loops of a convolution: those of a matrix product, of which one factor is read where it lies in the image.

    for row_block, column_block in parallel(4, 2):          some places of the result, some of its channels
        sums = scratch(f32, [784, 64])
        for column_tile in serial(4):
            right = scratch(f32, [576, 16])                 the weights of 16 channels, in the order of their memory
            for row_tile in serial(196):
                for row_in in vector(4, copies=4):          a tile: 4 places, 16 channels
                    for column_in in vector(16, lanes=4, copies=4):
                        with sum(f32) as total:
                            for tap in serial(3), serial(3):
                                for channel in serial(16), unrolled(4): ...
                        sums[4*row_tile + row_in, 16*column_tile + column_in] = total
        for row, column: ...                                what follows: a bias, an activation, a residual, stores

The places of all images are rows one after the other, so that small images have no tiles of their own to fill. Where a
window begins is computed once for a row of a tile. A weight that lies in panels is read as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ferrite.ir import ONE, ZERO, Axis, Index, Load, axis, number, op, sum_pieces
from ferrite.ir.kernel import Accumulate, Loop, Scratch, Store, Update
from ferrite.machines import Machine
from ferrite.schedule.cpu.convolutions import Convolution, factors_of
from ferrite.schedule.cpu.products import extent_of, panel_columns, step_along
from ferrite.schedule.cpu.tiled_sums import (
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
from ferrite.schedule.fusion.accesses import likely
from ferrite.schedule.loops.axes import Body, collapse, nested, replaced
from ferrite.schedule.loops.statements import Parts

UNKNOWN_STEP = 1 << 40  # a step in memory that is not known


def convolution_loops(convolution: Convolution, parts: Sequence[Parts], machine: Machine) -> Body:
    """The whole body of the kernel; `parts`: the sum, and what follows it at every point of the result."""
    convolution, parts = by_groups(convolution, parts)
    (state,), (update,) = parts[0].states, parts[0].point
    assert isinstance(update, Update)
    _, weight = factors_of(update.values[0], convolution)
    panel = panel_columns(weight, convolution.channels, machine)
    sides = sides_of(convolution, panel, state.dtypes[0], machine)
    tiles = ConvolutionTiles(*sides, state, update, machine, convolution, is_packed=panel is not None)
    follows = (*parts[0].after, *(statement for part in parts[1:] for statement in part.point))
    return tiles.loops(follows)


def by_groups(convolution: Convolution, parts: Sequence[Parts]) -> tuple[Convolution, Sequence[Parts]]:
    """Groups of channels, each with an image of its own, as a batch of convolutions."""
    if (together := convolution.together) is None:
        return convolution, parts
    group = axis("group", extent_of(convolution.channels) // together)
    channel = axis("channel", together)
    new: dict[Axis, Index] = {convolution.channels: group * together + channel}
    parts = [
        Parts(list(replaced(tuple(part.point), new)), part.states, list(replaced(tuple(part.after), new)))
        for part in parts
    ]
    return Convolution((*convolution.batch, group), convolution.places, channel, convolution.summed), parts


def sides_of(convolution: Convolution, panel: int | None, dtype: torch.dtype, machine: Machine) -> tuple[Side, Side]:
    """Places and channels, in tiles for the registers and in blocks for threads. `panel`: the channels of one, where
    the weight lies in panels."""
    places, channels = math.prod(map(extent_of, convolution.places)), extent_of(convolution.channels)
    lanes = machine.lanes(dtype)
    tall, vectors = machine.convolution_tile
    wide = panel or vectors * lanes
    tall_tiles = even_parts(-(-places // tall), max(machine.block_places // tall, 1))
    wide_tiles = even_parts(-(-channels // wide), max(machine.block_columns // wide, 1))
    summed = math.prod(map(extent_of, convolution.summed))
    blocks = math.prod(map(extent_of, convolution.batch)) * -(-places // (tall * tall_tiles))
    while wide_tiles > 1 and blocks * -(-channels // (wide * wide_tiles)) < machine.product_blocks:
        if tall * tall_tiles * wide * wide_tiles * summed < 2 * machine.min_block_products:
            break
        wide_tiles = -(-wide_tiles // 2)
    return Side("row", number(places), tall, tall_tiles), Side("column", number(channels), wide, wide_tiles, lanes)


@dataclass(frozen=True)
class ConvolutionTiles(TiledSums):
    convolution: Convolution
    is_packed: bool  # the weight lies in the order of its use already

    def in_result(self, row: Index, column: Index) -> dict[Axis, Index]:
        """The places of all images, one after the other, are the rows."""
        found = {self.convolution.channels: column}
        for item in reversed(self.convolution.places[1:]):
            found[item] = row % item.extent
            row = row // item.extent
        return {**found, self.convolution.places[0]: row}

    @cached_property
    def factors(self) -> tuple[Load, Load]:
        """The image, and the weight."""
        return factors_of(self.update.values[0], self.convolution)

    # --- what is summed -----------------------------------------------------------------------------------------------

    @property
    def summed_products(self) -> int:
        return math.prod(map(extent_of, self.convolution.summed))

    @cached_property
    def longest(self) -> Axis:
        """The axis that is cut, as a rule the channels of the image."""
        return max(self.convolution.summed, key=extent_of)

    @cached_property
    def piece(self) -> Axis:
        """The places in a piece of the longest axis."""
        size = sum_pieces.of_windows(extent_of(self.longest), self.summed_products // extent_of(self.longest))
        assert size is not None
        return axis("piece_in", size)

    @property
    def pieces(self) -> Axis:
        return axis("piece", extent_of(self.longest) // extent_of(self.piece))

    @property
    def place_in_sum(self) -> dict[Axis, Index]:
        begin = ZERO if self.pieces.extent is ONE else self.pieces * extent_of(self.piece)
        return {self.longest: begin + self.piece}

    def in_order_of(self, factor: Load) -> list[Axis]:
        """What a piece goes over, as a factor does in memory."""
        steps = {item: likely(step_along(factor, item) or ZERO, UNKNOWN_STEP) for item in self.convolution.summed}
        order = sorted(self.convolution.summed, key=lambda item: -steps[item])
        return [self.piece if item is self.longest else item for item in order]

    @cached_property
    def in_weight_order(self) -> list[Axis]:
        return self.in_order_of(self.factors[1])

    @property
    def panel(self) -> Scratch:
        rows = math.prod(map(extent_of, self.in_weight_order))
        return Scratch(RIGHT, self.factors[1].dtype, (number(rows), number(self.columns.tile)))

    @property
    def panel_row(self) -> Index:
        found: Index = ZERO
        for item in self.in_weight_order:
            found = found * item.extent + item
        return found

    # --- loops --------------------------------------------------------------------------------------------------------

    def loops(self, follows: Body) -> Body:
        sums: Body = ()
        for wide in self.columns.parts():
            tiles: Body = () if self.is_packed else (self.panel, *self.packing(wide))
            for tall in self.rows.parts():
                tiles += self.rows.around(tall, self.tile(tall, wide))
            sums += self.columns.around(wide, tiles)
        blocks = [*self.convolution.batch, self.rows.block, self.columns.block]
        return shared(longer_than_one(blocks), self.block(sums, follows), self.work, self.machine)

    def tile(self, tall: Part, wide: Part) -> Body:
        """The sums of one tile over a piece."""
        image, weight = self.factors
        if not self.is_packed:
            weight = Load.intern(RIGHT, (self.panel_row, wide.inside), self.panel.dtype)
        update: Body = (Update(self.update.state, (op("mul", image, weight),)),)
        update = replaced(update, {**self.in_result(tall.index, wide.index), **self.place_in_sum})
        *outer, last = self.in_order_of(image)
        at_once = steps_at_once(extent_of(last))
        steps, step = axis("steps", extent_of(last) // at_once), axis("step", at_once)
        update = replaced(update, {last: (ZERO if steps.extent is ONE else steps * at_once) + step})
        update = nested(longer_than_one([*outer, steps]), (Loop(step, "unrolled", update),), "serial")
        body: Body = (Accumulate((self.state,), update), Store(SUMS, (tall.place, wide.place), self.total, self.mode))
        return self.rows.tiled(tall, self.columns.tiled(wide, body))

    def packing(self, part: Part) -> Body:
        """Copy the weights of a tile over a piece: all its channels side by side."""
        _, weight = self.factors
        copy: Body = (Store(RIGHT, (self.panel_row, part.inside), weight),)
        copy = replaced(copy, {self.convolution.channels: part.index, **self.place_in_sum})
        axes, copy = collapse(self.in_weight_order, copy)
        lanes = self.machine.lanes(weight.dtype)
        if step_along(weight, self.convolution.channels) is not ONE:
            # squares of as many lanes, which are turned around in registers
            loop = Loop(part.inside, "vector", (Loop(axes[-1], "vector", copy, lanes),), copies=lanes)
            return nested(axes[:-1], (loop,), "serial")
        return nested(axes, (Loop(part.inside, "vector", copy, lanes, STEPS_AT_ONCE),), "serial")


def steps_at_once(length: int) -> int:
    """Of a sum over so many, written one after the other: a few, of which all have as many."""
    if length <= 2 * STEPS_AT_ONCE:
        return length
    return next(many for many in range(STEPS_AT_ONCE, 0, -1) if length % many == 0)
