"""Strips: where much is computed from the column alone, it is computed once for many rows.

Enlarging an image finds, for every result, the places it is made of and their weights. Those of a column are the same
in every row, so a strip of columns goes through a block of rows, and keeps them in registers. The block is small enough
for the cache, where the strips after it find the lines they share.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir.expr import Cast, Expr, Local, Op
from ferrite.ir.index import Axis, Number
from ferrite.ir.kernel import Loop, nodes_in
from ferrite.ir.scalar import OPERATORS
from ferrite.schedule.loops import Body, cut, lanes_for, work_of
from ferrite.schedule.machine import Machine
from ferrite.schedule.touches import known

WORTH = 8  # additions at every point that a strip saves
FEWEST = 8  # rows, for which that pays
VECTORS = 4  # side by side in a strip


def in_strips(axes: Sequence[Axis], body: Body, machine: Machine) -> tuple[list[Axis], Body, int] | None:
    """The axes around, what stands inside them and the work of that; None where strips do not pay."""
    if len(axes) < 2:
        return None
    *outer, row, column = axes
    if not isinstance(column.extent, Number) or not isinstance(row.extent, Number) or row.extent.value < FEWEST:
        return None
    if work_of_column(row, column, body) < WORTH:
        return None
    lanes = lanes_for(body, machine)
    if column.extent.value < lanes * VECTORS:
        return None
    rows = max(machine.mid // (16 * column.extent.value), FEWEST)  # four bytes an element, a quarter of the cache
    if row.extent.value > rows:
        block, row, body = cut(row, rows, body)
        outer.append(block)
    strip = Loop(column, "vector", (Loop(row, "serial", body),), lanes, VECTORS)
    return outer, (strip,), work_of(body) * known(row.extent, rows) * column.extent.value


def work_of_column(row: Axis, column: Axis, body: Body) -> int:
    """Work at one point that is the same in every row, in additions. What memory says may change, and is left out."""
    found: set[Expr] = set()
    for statement in body:
        named: set[Expr] = set()
        for item in nodes_in(statement):
            if isinstance(item, Local) or not named.isdisjoint(item.under):
                named.add(item)
            elif isinstance(item, Op | Cast) and column in item.atoms and row not in item.atoms and not item.loads:
                found.add(item)
    return sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in found)
