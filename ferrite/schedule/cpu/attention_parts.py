"""What both ways through the keys of attention are written with: names of tiles, states, and loops in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Expr,
    Index,
    Load,
    Local,
    axis,
    cast,
    const,
    index_value,
    maximum,
    minimum,
    op,
)
from ferrite.ir.kernel import Loop, State
from ferrite.schedule.cpu.tiled_sums import STEPS_AT_ONCE
from ferrite.schedule.fusion.accesses import step_of
from ferrite.schedule.loops.axes import Body, replaced

F32, I64 = torch.float32, torch.int64
NOTHING, INFINITE, ZERO_F32, ONE_F32 = (const(value, F32) for value in (-math.inf, math.inf, 0.0, 1.0))
LOG2_E = const(1.4426950408889634, F32)
ALWAYS = const(True, torch.bool)
# Tiles of scratch: the queries of a block, its scores and then weights, the sums of weighted values, and by row the
# greatest score so far, the sum of weights, and by how much both sums become smaller with a block; keys and values that
# are widened.
QUERY, SCORES, RESULT = "queries", "weights", "weighted"
GREATEST, TOTAL, SHRUNK = "greatest", "total", "shrunk"
KEY, VALUE = "wide_keys", "wide_values"
PRODUCT = Local.intern("product", F32)
SUM, MOST = State("sum", ("product",), (F32,)), State("amax", ("most",), (F32,))


@dataclass(frozen=True)
class Keys:
    """Some keys that are gone through together: `count` from `begin` on, `most` at most. `asked`: whether any of them
    may not be allowed."""

    begin: Index
    count: Index
    most: int
    asked: bool

    @property
    def each(self) -> Axis:
        return axis("key", self.count)


def at(name: str, *coordinates: Index) -> Load:
    return Load.intern(name, coordinates, F32)


def steps_of(whole: Axis, count: Index, most: int, body: Body) -> Body:
    """A loop in order over so many values of an axis, `most` at most, some of them written out."""
    steps, step = axis("steps", count // STEPS_AT_ONCE), axis("step", STEPS_AT_ONCE)
    left = axis("left", count % STEPS_AT_ONCE)
    found: Body = ()
    if steps.extent is not ZERO:
        written = replaced(body, {whole: steps * STEPS_AT_ONCE + step})
        found += (Loop(steps, "serial", (Loop(step, "unrolled", written),)),)
    if left.extent is not ZERO:
        place = within(count // STEPS_AT_ONCE * STEPS_AT_ONCE + left, most)
        found += (Loop(left, "serial", replaced(body, {whole: place})),)
    return found


def within(place: Index, most: int) -> Index:
    """A place below `most` in a form that the laws see it in."""
    return maximum(minimum(place, most - 1), 0)


def equal(left: Expr, right: Expr) -> Expr:
    return op("eq", left, right, dtype=torch.bool)


def kept_inside(value: Expr, most: Index) -> Expr:
    """A number from memory, from 0 to the most that it may be."""
    return op("maximum", op("minimum", cast(value, I64), index_value(most)), const(0, I64))


def lies_along(value: Expr, item: Axis) -> bool:
    return isinstance(value, Load) and step_of(value.coordinates[0], item) is ONE
