"""Rows that are added to a table where memory says: every thread owns a share of the table.

    for i, j:  table[ids[i], j] += x[i, j]

Threads cannot share i, as two may meet at one row of the table; nor is it good to share j, as each thread would go
through narrow stripes of memory. So each goes through all ids, and does the rows that lie in its share. The order of
additions at one place is that of the loop, so the result is the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrite.ir import (
    ONE,
    Axis,
    Data,
    Index,
    IndexValue,
    Local,
    Number,
    Sum,
    axis,
    const,
    data,
    index_value,
    number,
    op,
    substitute,
)
from ferrite.ir.kernel import Let, Loop, Store, When
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import rows_at_once, vector_loop
from ferrite.schedule.fusion.accesses import axes_in, likely, step_of
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, nested, work_of
from ferrite.schedule.loops.statements import Parts


def owned(rows: Sequence[Axis], column: Axis, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine) -> Body:
    """The loops, where there is one table and rows of a known length; nothing otherwise."""
    if len(nests) != 1 or list(rows) != [column] or parts[0].states or not isinstance(column.extent, Number):
        return ()
    (nest,), (part,) = nests, parts
    *before, last = part.point
    shares = min(column.extent.value // machine.min_share_elements, machine.max_shares)
    if not isinstance(last, Store) or last.mode == "set" or not all(isinstance(item, Let) for item in before):
        return ()
    where = deciding(last.coordinates[0], column)
    if where is None or shares < 2 or not isinstance(where.extent, Number) or where.extent.value < shares:
        return ()
    size = -(-where.extent.value // shares)
    share = axis("share", shares)
    inside = op("sub", Local.intern("row", torch.int64), index_value(share * size))
    mine = Local.intern("row_in_share", torch.int64)
    place = substitute(last.coordinates[0], {where: share * size + data(mine, number(size))})
    store = Store(last.buffer, (place,), last.value, last.mode)
    is_mine = op(
        "logical_and",
        op("ge", mine, const(0, torch.int64), dtype=torch.bool),
        op("lt", mine, const(size, torch.int64), dtype=torch.bool),
    )
    body: Body = (
        Let("row", IndexValue.intern(where, torch.int64)),  # checked here, as no share has what is outside
        Let("row_in_share", inside),
        When(is_mine, (vector_loop(column, (*before, store), machine),)),
    )
    rounds = 1
    for item in nest.axes:
        rounds *= likely(item.extent)
    work = work_of((*before, store)) * rounds * column.extent.value // shares
    loops = nested(nest.axes, body, "serial")
    return (Loop(share, "parallel", loops, copies=rows_at_once(machine, work)),)


def deciding(index: Index, column: Axis) -> Data | None:
    """What is read from memory to find a row of the table; None where a column decides it too."""
    if step_of(index, column) is not ONE or not isinstance(index, Sum):
        return None
    found = [(factor, item) for item, factor in index.terms if isinstance(item, Data)]
    if not found:
        return None
    _factor, item = max(found, key=lambda pair: pair[0])
    return None if column in axes_in(item) else item
