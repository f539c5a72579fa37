"""Attention of few rows, as in decoding: vectors lie along the elements of keys and values, as memory does.

    for key_tile in serial(8):
        for row in vector(1, copies=1):
            for key_in in vector(8, copies=8):
                with sum(f32) as product:
                    for d in reduction(64, lanes=16): ...           query[r, d] * key[n, d]
    ...                                                             the function, in vectors of keys
    for row in vector(1, copies=1):
        for e in vector(64, lanes=16, copies=4):
            with sum(f32) as product:
                for key in serial(64): ...                          weights[r, n] * value[n, e]

Each key is loaded once for all rows. All else is as `ferrite.schedule.cpu.attention_rows` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ferrite.ir import Axis, Expr, Index, axis, cast, op, rewrite_indices
from ferrite.ir.kernel import Accumulate, Loop, Store, Update
from ferrite.ir.program import Destination
from ferrite.schedule.cpu.attention_parts import (
    F32,
    GREATEST,
    NOTHING,
    PRODUCT,
    QUERY,
    RESULT,
    SCORES,
    SHRUNK,
    SUM,
    TOTAL,
    ZERO_F32,
    Keys,
    at,
    steps_of,
    within,
)
from ferrite.schedule.cpu.attention_rows import RowBlocks
from ferrite.schedule.cpu.products import extent_of
from ferrite.schedule.cpu.vectors import vector_loop
from ferrite.schedule.loops.axes import Body


@dataclass(frozen=True)
class FewRows(RowBlocks):
    def place(self, other: Index, row: Index) -> tuple[Index, Index]:
        return row, other

    @cached_property
    def width(self) -> int:
        high = self.one.rows.extent.high
        assert high is not None
        return max(high, 1)

    def wide_factors(self) -> list[tuple[str, Expr, Axis]]:
        return []  # what is read is used so seldom that it is widened where it is

    def along(self, item: Axis, row: Axis, body: Body) -> Body:
        """Loops over rows, and the elements of each."""
        return (Loop(row, "serial", (vector_loop(item, body, self.machine),)),)

    def all_rows(self, body: Body) -> Loop:
        return Loop(self.every, "vector", body, copies=self.width)

    def each_row(self, row: Axis, body: Body) -> Loop:
        return Loop(row, "serial", body)

    def over_keys(self, keys: Keys, body: Body) -> Loop:
        return vector_loop(keys.each, body, self.machine, "reduction")

    def queries(self) -> Body:
        zero = Store(QUERY, (self.every, self.one.summed), ZERO_F32)
        copy = Store(QUERY, (self.real, self.one.summed), cast(self.here(self.one.query), F32))
        before = self.along(self.one.summed, self.every, (zero,)) if self.is_ragged else ()
        return (*before, *self.along(self.one.summed, self.real, (copy,)))

    def nothing_yet(self) -> Body:
        zero = Store(RESULT, (self.every, self.one.columns), ZERO_F32)
        begin = Store(GREATEST, (self.every,), NOTHING), Store(TOTAL, (self.every,), ZERO_F32)
        return (Loop(self.every, "serial", begin), *self.along(self.one.columns, self.every, (zero,)))

    def quotients(self, result: Destination, value: Expr) -> Body:
        return self.along(self.one.columns, self.real, self.stored(result, value))

    def products(self, keys: Keys) -> Body:
        """Sums over a row of keys, for all rows and a few keys at a time."""
        one, row = self.one, self.every
        key = cast(self.here(one.key, keys), F32)
        lanes = min(self.machine.lanes(F32), extent_of(one.summed))

        def sums_of(place: Index) -> Body:
            factors = self.at(QUERY, one.summed, row), rewrite_indices(key, {keys.each: place})
            update = Update("product", (op("mul", *factors),))
            body: Body = (Accumulate((SUM,), (Loop(one.summed, "reduction", (update,), lanes),)),)
            return (*body, Store(SCORES, (row, place), PRODUCT))

        high = max(min(self.machine.few_row_sums // self.width, self.machine.few_row_keys), 1)
        tiles, places, rest = axis("tile", keys.count // high), axis("place_in", high), axis("rest", keys.count % high)
        tile = Loop(places, "vector", sums_of(tiles * high + places), copies=high)
        last = within(keys.count // high * high + rest, keys.most)
        return (
            Loop(tiles, "serial", (self.all_rows((tile,)),)),
            Loop(rest, "serial", (self.all_rows(sums_of(last)),)),
        )

    def sums(self, keys: Keys) -> Body:
        """Values, weighted: vectors lie along their elements."""
        one, row = self.one, self.every
        value = cast(self.here(one.value, keys), F32)
        update = Update("product", (op("mul", self.at(SCORES, keys.each, row), value),))
        before = op("mul", self.at(RESULT, one.columns, row), at(SHRUNK, row))
        body: Body = (Accumulate((SUM,), steps_of(keys.each, keys.count, keys.most, (update,))),)
        body += (Store(RESULT, (row, one.columns), op("add", before, PRODUCT)),)
        lanes = self.machine.lanes(F32)
        many = extent_of(one.columns)
        while lanes > many:
            lanes //= 2
        copies = max(min(self.machine.few_row_sums // self.width, many // lanes), 1)
        return (Loop(one.columns, "vector", (self.all_rows(body),), lanes, copies),)
