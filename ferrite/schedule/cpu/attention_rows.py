"""Attention with rows side by side in vectors: a block of them goes through the keys, with running maxima.

    for b in parallel(2):
        for h in parallel(4):
            for g in parallel(1):
                for row_block in parallel(8):                       64 rows, side by side in vectors
                    query = scratch(f32, [64, 64])                  one element of all rows after the other
                    for key_block in serial(8):                     64 keys
                        scores = scratch(f32, [64, 64])             products, in tiles of registers; then the function
                        ...                                         of the user, with the greatest of each row
                        ...                                         what is there so far becomes smaller
                        ...                                         weights, and their sum for each row
                        result[e, r] = shrunk[r] * result[e, r] + (sum over keys of value[n, e] * weights[n, r])
                    for e in ...: out[m, e] = result[e, r] / total[r]

Rows lie side by side in vectors, all the way: keys and values are read in the order of memory, an element at a time,
for all rows of a block, and nothing of them is packed (those of 16 bits are widened, a block at a time). What is
greatest in a row, and sums over its keys, are then elementwise. Only queries and results are turned around.

With lists of blocks only those in them are gone through; where all of a block is allowed, nobody asks. Threads share
rows, never the keys of one: values do not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ferrite.graph import HALVES
from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Expr,
    Index,
    IndexValue,
    Load,
    Local,
    Op,
    Param,
    axis,
    cast,
    data,
    minimum,
    number,
    op,
    rewrite_indices,
    rewrite_nodes,
)
from ferrite.ir.kernel import Accumulate, Let, Loop, Scratch, Store, Update
from ferrite.ir.program import Attention, BlockList, Destination
from ferrite.machines import Machine
from ferrite.schedule.cpu.attention_parts import (
    ALWAYS,
    F32,
    GREATEST,
    I64,
    INFINITE,
    KEY,
    LOG2_E,
    MOST,
    NOTHING,
    ONE_F32,
    PRODUCT,
    QUERY,
    RESULT,
    SCORES,
    SHRUNK,
    SUM,
    TOTAL,
    VALUE,
    ZERO_F32,
    Keys,
    at,
    equal,
    kept_inside,
    lies_along,
    steps_of,
    within,
)
from ferrite.schedule.cpu.products import extent_of
from ferrite.schedule.cpu.tiled_sums import longer_than_one
from ferrite.schedule.cpu.vectors import shared, vector_loop
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of
from ferrite.schedule.loops.axes import Body, index_over, nested

TileOf = Callable[[Index, Index], Body]  # of a row, and a key or column


@dataclass(frozen=True)
class RowBlocks:
    """Rows side by side in vectors."""

    one: Attention
    machine: Machine

    def place(self, other: Index, row: Index) -> tuple[Index, Index]:
        """Where a tile has an element of a row."""
        return other, row

    def at(self, name: str, other: Index, row: Index) -> Load:
        return at(name, *self.place(other, row))

    # --- sizes --------------------------------------------------------------------------------------------------------

    @cached_property
    def width(self) -> int:
        """Rows of a block: whole vectors, which lists of blocks do not cut. Fewer where blocks would be few for threads
        to share, or a good part of the last one empty. What a row is does not depend on it."""
        one, most, lanes = self.one, self.machine.attention_rows, self.machine.lanes(F32)
        if one.lists:
            return math.gcd(most, one.block_sides[0])
        rows, high = likely(one.rows.extent), one.rows.extent.high
        if high is not None and high <= most // 2:
            return -(-max(high, 1) // lanes) * lanes

        def cost(width: int) -> float:
            blocks = -(-rows // width)
            are_few = likely_points((*one.axes, one.group)) * blocks < self.machine.product_blocks
            return blocks * width * (1.0 if width == most else self.machine.narrow_rows_cost) + (rows if are_few else 0)

        widths = [most, most * 3 // 4, most // 2]
        return min((each for each in widths if each % lanes == 0), key=cost, default=most)

    @cached_property
    def lanes(self) -> int:
        return math.gcd(self.machine.lanes(F32), self.width)

    @cached_property
    def length(self) -> int:
        """Keys of a block."""
        length = self.machine.attention_keys
        return math.gcd(length, self.one.block_sides[1]) if self.one.lists else length

    @cached_property
    def tile(self) -> tuple[int, int]:
        """How many sums a tile of registers has: rows, in vectors, and keys or columns."""
        vectors, others = self.machine.attention_tile
        many = self.width // self.lanes
        while many % vectors:
            vectors -= 1
        return vectors * self.lanes, min(others * self.machine.attention_tile[0] // vectors, 2 * others)

    # --- axes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def block(self) -> Axis:
        return axis("row_block", (self.one.rows.extent + (self.width - 1)) // self.width)

    @property
    def begin(self) -> Index:
        return ZERO if self.block.extent is ONE else self.block * self.width

    @cached_property
    def real(self) -> Axis:
        """The rows of a block that there are."""
        return axis("row", minimum(self.width, self.one.rows.extent - self.begin))

    @cached_property
    def every(self) -> Axis:
        """All rows of a block: behind the last are some that nobody wants."""
        return axis("row", self.width)

    @property
    def is_ragged(self) -> bool:
        return self.real.extent is not number(self.width)

    def over_rows(self, body: Body) -> Loop:
        return vector_loop(self.every, body, self.machine)

    def here(self, value: Expr, keys: Keys | None = None) -> Expr:
        """An expression at a row of the block, and a key."""
        new: dict[Axis, Index] = {self.one.rows: self.begin + self.real}
        if keys is not None:
            new[self.one.keys] = keys.begin + keys.each
        return rewrite_indices(value, new)

    # --- the kernel ---------------------------------------------------------------------------------------------------

    def loops(self) -> Body:
        one = self.one
        summed, columns = (extent_of(each) for each in (one.summed, one.columns))
        tiles = [(QUERY, summed), (SCORES, self.length), (RESULT, columns)]
        body: Body = tuple(Scratch(name, F32, self.place(number(size), number(self.width))) for name, size in tiles)
        body += tuple(Scratch(name, F32, (number(self.width),)) for name in (GREATEST, TOTAL, SHRUNK))
        body += tuple(Scratch(name, F32, (number(self.length), along.extent)) for name, _, along in self.wide_factors())
        body += (*self.queries(), *self.nothing_yet(), *self.through_keys(), *self.results())
        around = longer_than_one([*one.axes, one.group, self.block])
        keys = likely(one.keys.extent)
        work = self.width * keys * (summed + columns) // self.machine.products_of_an_addition
        return shared(around, body, work, self.machine)

    def queries(self) -> Body:
        """The queries of a block, turned around: one element of all rows after the other."""
        one, lanes = self.one, self.machine.lanes(F32)
        body: Body = ()
        if self.is_ragged:
            zero: Body = (Store(QUERY, (one.summed, self.every), ZERO_F32),)
            body += (Loop(one.summed, "serial", (self.over_rows(zero),)),)
        value = cast(self.here(one.query), F32)
        copy = Store(QUERY, (one.summed, self.real), value)
        if lies_along(one.query, one.summed):
            return (*body, Loop(self.real, "vector", (Loop(one.summed, "vector", (copy,), lanes),), copies=lanes))
        return (*body, Loop(one.summed, "serial", (vector_loop(self.real, (copy,), self.machine),)))

    def nothing_yet(self) -> Body:
        zero = Store(RESULT, self.place(self.one.columns, self.every), ZERO_F32)
        begin = Store(GREATEST, (self.every,), NOTHING), Store(TOTAL, (self.every,), ZERO_F32)
        return (self.over_rows(begin), Loop(self.one.columns, "serial", (self.over_rows((zero,)),)))

    def results(self) -> Body:
        """What the sums come to. A row without anything allowed is zero."""
        one = self.one
        result, logarithm, greatest = one.destinations
        total, most = at(TOTAL, self.real), at(GREATEST, self.real)
        body: Body = ()
        by_row: Body = ()
        if logarithm is not None:
            value = op("add", op("mul", most, LOG2_E), op("log2", total))
            value = op("where", equal(total, ZERO_F32), NOTHING, value, dtype=F32)
            by_row += self.stored(logarithm, op("where", equal(most, INFINITE), INFINITE, value, dtype=F32))
        if greatest is not None:
            by_row += self.stored(greatest, op("mul", most, LOG2_E))
        if by_row:
            body += (vector_loop(self.real, by_row, self.machine),)
        if result is None:
            return body
        divisor = op("where", equal(at(TOTAL, self.every), ZERO_F32), ONE_F32, at(TOTAL, self.every), dtype=F32)
        body += (self.over_rows((Store(TOTAL, (self.every,), divisor),)),)
        return (*body, *self.quotients(result, op("div", self.at(RESULT, one.columns, self.real), total)))

    def quotients(self, result: Destination, value: Expr) -> Body:
        one, store, (place,) = self.one, self.stored(result, value), result.coordinates
        if step_of(place, one.columns) is ONE:  # squares, which are turned around in registers
            lanes = self.machine.lanes(F32)
            return (Loop(one.columns, "vector", (Loop(self.real, "vector", store, lanes),), copies=lanes),)
        return (Loop(one.columns, "serial", (vector_loop(self.real, store, self.machine),)),)

    def stored(self, place: Destination, value: Expr) -> Body:
        dtype = self.one.query.dtype if place is self.one.destinations[0] else F32
        coordinates = tuple(index_over(each, {self.one.rows: self.begin + self.real}) for each in place.coordinates)
        return (Store(place.buffer, coordinates, cast(value, dtype)),)

    # --- through the keys ---------------------------------------------------------------------------------------------

    def through_keys(self) -> Body:
        if (last := self.last_allowed) is not None:
            below = minimum(last, self.one.keys.extent) // self.length * self.length
            end = minimum(last + (self.width - 1), self.one.keys.extent)
            sure = self.in_order(ZERO, below, "key_block", asked=False)
            return (*sure, *self.in_order(below, end - below, "last_block", asked=True))
        if not self.one.lists:
            return self.in_order(ZERO, self.one.keys.extent, "key_block", asked=True)
        return tuple(each for number_, some in enumerate(self.one.key_blocks) for each in self.listed(some, number_))

    @property
    def last_allowed(self) -> Index | None:
        """How many keys the first row of a block may have, where every row may have one more than the row before it,
        and all keys before: where attention is causal. Blocks behind the last are not looked at."""
        rows, allowed = self.one.rows, self.one.allowed
        if self.one.lists or not isinstance(allowed, Op) or allowed.name != "ge":
            return None
        row, key = allowed.operands
        if not isinstance(row, IndexValue) or not isinstance(key, IndexValue) or key.index is not self.one.keys:
            return None
        return self.begin + 1 if row.index is rows else None

    def in_order(self, begin: Index, count: Index, name: str, asked: bool) -> Body:
        """So many keys from a place on, block by block."""
        blocks = axis(name, (count + (self.length - 1)) // self.length)
        this = ZERO if blocks.extent is ONE else blocks
        done = this * self.length
        keys = Keys(begin + done, minimum(self.length, count - done), self.length, asked)
        return nested(longer_than_one([blocks]), self.step(keys), "serial")

    def listed(self, some: BlockList, place: int) -> Body:
        """The keys in the blocks of a list. What memory says is kept inside its bounds, as nobody checks it."""
        one, side = self.one, self.one.block_sides[1]
        first: dict[Axis, Index] = {one.rows: self.begin}
        entries, blocks = some.entry.extent, (one.keys.extent + (side - 1)) // side
        count = kept_inside(rewrite_indices(some.count, first), entries)
        many = Let(f"count{place}", count)
        entry = axis(f"entry{place}", data(Local.intern(many.name, I64), entries + 1))
        number_of = kept_inside(rewrite_indices(some.place, {**first, some.entry: entry}), blocks - 1)
        this = Let(f"place{place}", number_of)
        begin = data(Local.intern(this.name, I64), blocks) * side
        left = minimum(side, one.keys.extent - begin) if one.keys.extent % side is not ZERO else number(side)
        step = self.in_order(begin, left, f"part{place}", asked=not some.whole)
        return (many, Loop(entry, "serial", (this, *step)))

    def step(self, keys: Keys) -> Body:
        """What some keys add to all rows of a block."""
        return (*self.widened(keys), *self.products(keys), *self.scores(keys), *self.weights(keys), *self.sums(keys))

    def wide_factors(self) -> list[tuple[str, Expr, Axis]]:
        """Keys and values of 16 bits: of each the tile where it is widened, an element, and the axis of a row."""
        both = (KEY, self.one.key, self.one.summed), (VALUE, self.one.value, self.one.columns)
        return [each for each in both if each[1].dtype in HALVES]

    def widened(self, keys: Keys) -> Body:
        """Keys and values of 16 bits, as they are multiplied."""
        body: Body = ()
        for name, value, along in self.wide_factors():
            copy = Store(name, (keys.each, along), cast(self.here(value, keys), F32))
            body += (Loop(keys.each, "serial", (vector_loop(along, (copy,), self.machine),)),)
        return body

    def products(self, keys: Keys) -> Body:
        """All sums of products of the block: some keys at a time, and as many rows as registers hold of their sums."""
        one = self.one
        key = at(KEY, keys.each, one.summed) if one.key.dtype in HALVES else self.here(one.key, keys)
        summed = extent_of(one.summed)

        def tile(row: Index, place: Index) -> Body:
            update = Update(
                "product", (op("mul", self.at(QUERY, one.summed, row), rewrite_indices(key, {keys.each: place})),)
            )
            body = steps_of(one.summed, number(summed), summed, (update,))
            return (Accumulate((SUM,), body), Store(SCORES, (place, row), PRODUCT))

        return self.in_tiles(keys.count, keys.most, tile)

    def scores(self, keys: Keys) -> Body:
        """Scores where there were products, minus infinity where they are not allowed; and what is greatest so far."""
        one = self.one
        product = self.at(SCORES, keys.each, self.real)
        score = rewrite_nodes(self.here(one.score, keys), lambda item: product if isinstance(item, Param) else item)
        if keys.asked and one.allowed is not ALWAYS:
            score = op("where", self.here(one.allowed, keys), score, NOTHING, dtype=F32)
        name = Local.intern("score", F32)
        store = Store(SCORES, self.place(keys.each, self.real), name)
        point: Body = (Let("score", score), store, Update("most", (name,)))
        body: Body = (Accumulate((MOST,), (self.over_keys(keys, point),)),)
        before, most = at(GREATEST, self.real), Local.intern("most", F32)
        higher, safe = Local.intern("higher", F32), Local.intern("safe", F32)
        body += (
            Let("higher", op("maximum", before, most)),
            Let("safe", op("where", equal(higher, NOTHING), ZERO_F32, higher, dtype=F32)),
            Store(SHRUNK, (self.real,), op("exp", op("sub", before, safe))),
            Store(GREATEST, (self.real,), higher),
        )
        return (self.each_row(self.real, body),)

    def weights(self, keys: Keys) -> Body:
        """Exponentials of scores, and their sum for each row."""
        row, weight = self.every, Local.intern("weight", F32)
        value = op("exp", op("sub", self.at(SCORES, keys.each, row), Local.intern("safe", F32)))
        store = Store(SCORES, self.place(keys.each, row), weight)
        point: Body = (Let("weight", value), store, Update("product", (weight,)))
        greatest = at(GREATEST, row)
        body: Body = (
            Let("safe", op("where", equal(greatest, NOTHING), ZERO_F32, greatest, dtype=F32)),
            Accumulate((SUM,), (self.over_keys(keys, point),)),
            Store(TOTAL, (row,), op("add", op("mul", at(TOTAL, row), at(SHRUNK, row)), PRODUCT)),
        )
        return (self.each_row(row, body),)

    def each_row(self, row: Axis, body: Body) -> Loop:
        return vector_loop(row, body, self.machine)

    def over_keys(self, keys: Keys, body: Body) -> Loop:
        """What updates a state of a row."""
        return Loop(keys.each, "serial", body)

    def sums(self, keys: Keys) -> Body:
        """Values, weighted, in tiles as the products."""
        one = self.one
        value = at(VALUE, keys.each, one.columns) if one.value.dtype in HALVES else self.here(one.value, keys)

        def tile(row: Index, place: Index) -> Body:
            column = rewrite_indices(value, {one.columns: place})
            update = Update("product", (op("mul", self.at(SCORES, keys.each, row), column),))
            before = op("mul", self.at(RESULT, place, row), at(SHRUNK, row))
            body = steps_of(keys.each, keys.count, keys.most, (update,))
            return (Accumulate((SUM,), body), Store(RESULT, (place, row), op("add", before, PRODUCT)))

        return self.in_tiles(one.columns.extent, extent_of(one.columns), tile)

    def in_tiles(self, count: Index, most: int, tile: TileOf) -> Body:
        """Loops over tiles: so many places, and all rows. What is left of the places has tiles of one."""
        wide, high = self.tile
        strips = axis("strip", self.width // wide)
        inside = axis("row_in", wide)
        row = inside if strips.extent is ONE else strips * wide + inside

        def at_places(place: Index, extra: Sequence[Axis]) -> Body:
            body: Body = tile(row, place)
            for each in extra:
                body = (Loop(each, "vector", body, 1, extent_of(each)),)
            loop = Loop(inside, "vector", body, self.lanes, wide // self.lanes)
            return nested(longer_than_one([strips]), (loop,), "serial")

        tiles, places = axis("tile", count // high), axis("place_in", high)
        rest = axis("rest", count % high)
        found: Body = ()
        if tiles.extent is not ZERO:
            this = ZERO if tiles.extent is ONE else tiles
            found += nested(longer_than_one([tiles]), at_places(this * high + places, [places]), "serial")
        if rest.extent is not ZERO:
            place = within(count // high * high + rest, most)
            found += (Loop(rest, "serial", at_places(place, [])),)
        return found
