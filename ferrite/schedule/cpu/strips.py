"""Strips: where much is computed from the column alone, it is computed once for many rows.

Enlarging an image finds, for every result, the places it is made of and their weights. Those of a column are the same
in every row, so a strip of columns goes through a block of rows, and keeps them in registers. The block is small enough
for the cache, where the strips after it find the lines they share.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import OPERATORS, Axis, Cast, Expr, Local, Op
from ferrite.ir.kernel import Loop, nodes_in
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import lanes_for
from ferrite.schedule.fusion.accesses import likely, upper_estimate
from ferrite.schedule.loops.axes import Body, cut, work_of


def in_strips(axes: Sequence[Axis], body: Body, machine: Machine) -> tuple[list[Axis], Body, int] | None:
    """The axes around, what stands inside them and the work of that; None where strips do not pay."""
    if len(axes) < 2:
        return None
    *outer, row, column = axes
    if likely(row.extent) < machine.min_strip_rows:
        return None
    if work_of_column(row, column, body) < machine.min_strip_additions:
        return None
    lanes = lanes_for(body, machine)
    width = likely(column.extent)
    if width < lanes * machine.strip_vectors:
        return None
    rows = max(
        machine.l2_bytes // (16 * width), machine.min_strip_rows
    )  # four bytes an element, a quarter of the cache
    if upper_estimate(row.extent, rows + 1) > rows:
        block, row, body = cut(row, rows, body)
        outer.append(block)
    strip = Loop(column, "vector", (Loop(row, "serial", body),), lanes, machine.strip_vectors)
    return outer, (strip,), work_of(body) * min(likely(row.extent), rows) * width


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
