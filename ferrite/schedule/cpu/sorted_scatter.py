"""Rows that are added to a table where memory says: sources are sorted by the row they go to, every row is made once.

    for i, j:  table[ids[i], j] += x[i, j]

    count, for each row of the table, how many sources it has; so, where its own begin in a list of all
    put the number of every source into that list
    for r, j:  table[r, j] = table[r, j] + x[list[begin of r], j] + ... + x[list[end of r], j]

Sorting is linear, and little beside rows that are long. Then threads share the rows of the table, several rows of the
sources are read at a time, and what fills the table beforehand (a copy, zeros) is done on the way, as is what is made
of it afterwards, element by element: of a table that only this needs, a half-precision gradient's, there is never more
than a few vectors. The order of additions at one place is that of the sources, so the result is the same for any number
of threads, and that of eager.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Data,
    Expr,
    Index,
    IndexValue,
    Load,
    Local,
    Number,
    arithmetic_type,
    axis,
    cast,
    const,
    data,
    index_value,
    number,
    op,
    program,
    substitute,
)
from ferrite.ir.kernel import Accumulate, Let, Loop, Scratch, State, Statement, Store, Update, When
from ferrite.ir.program import Compute, Operation, stores_of
from ferrite.machines import Machine
from ferrite.schedule.cpu.vectors import lanes_for, shared
from ferrite.schedule.fusion.accesses import axes_in, step_of
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.loops.axes import Body, nested, replaced, with_values, work_of

KINDS = {"add": "sum", "mul": "prod", "amax": "amax", "amin": "amin"}
MAX_SORTED_ROWS = 1 << 20  # and sources: their numbers are kept in memory, four bytes each
I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class SortedScatter:
    """`sources`: the axes of what is added, `count` points in all; `rows`: how many the table has; `row`, `last`: the
    axes with which they are filled, and read when they are complete; `kept`: whether anything else needs the table."""

    table: str
    column: Axis
    sources: tuple[Axis, ...]
    rows: int
    count: int
    row: Axis | None = None
    last: Axis | None = None
    kept: bool = True


def sorted_scatter_of(members: Sequence[Member], rows: Sequence[Axis], machine: Machine) -> SortedScatter | None:
    """What is added to one table, perhaps after an operation that fills it, and before one that reads all of it; None
    for anything else."""
    at = next((place for place, member in enumerate(members) if combines(member.operation)), None)
    if at is None or len(rows) != 1:
        return None
    before, addition, after = members[:at], members[at], members[at + 1 :]
    found = added(addition.operation, rows[0], machine)
    if found is None or len(before) > 1 or len(after) > 1:
        return None
    (store,) = stores_of(addition.operation)
    filled = [filling(member.operation, store, rows[0]) for member in before]
    read = [reading(member, members[: at + 1], store, rows[0]) for member in after]
    if any(row is None or row.extent is not number(found.rows) for row in filled + read):
        return None
    if not filled and not read and found.rows > machine.max_table_rows_per_source * found.count:
        return None
    return replace(found, row=next(iter(filled), None), last=next(iter(read), None))


def combines(operation: Operation) -> bool:
    return any(store.mode in KINDS for store in stores_of(operation))


def added(operation: Operation, column: Axis, machine: Machine) -> SortedScatter | None:
    """What is added row by row, where the rows are long and few enough to be sorted."""
    if not isinstance(operation, Compute) or len(operation.stores) != 1:
        return None
    (store,) = operation.stores
    places = [index for index in store.coordinates if isinstance(index, Data)]
    others = [index for index in store.coordinates if not isinstance(index, Data) and index is not ZERO]
    dtype = store.value.dtype
    if store.mode not in KINDS or arithmetic_type(dtype) != dtype or len(places) != 1 or others != [column]:
        return None
    (where,), sources = places, tuple(item for item in operation.axes if item is not column)
    sizes = [where.extent, column.extent, *(item.extent for item in sources)]
    numbers = [size.value for size in sizes if isinstance(size, Number)]
    if len(numbers) < len(sizes) or not sources or column in axes_in(where):
        return None
    rows, width, *counts = numbers
    count = math.prod(counts)
    few = 0 < count <= MAX_SORTED_ROWS and 0 < rows <= MAX_SORTED_ROWS
    fits = few and width >= machine.min_sorted_row_elements
    return SortedScatter(store.buffer, column, sources, rows, count) if fits else None


def filling(fill: Operation, store: program.Store, column: Axis) -> Axis | None:
    """The axis with which an operation goes through the rows of a table, where it does nothing but fill that."""
    if not isinstance(fill, Compute) or len(fill.stores) != 1 or len(fill.axes) != 2 or column not in fill.axes:
        return None
    (first,), (row,) = fill.stores, (item for item in fill.axes if item is not column)
    wanted = tuple(row if isinstance(index, Data) else index for index in store.coordinates)
    fits = (first.buffer, first.mode, first.coordinates) == (store.buffer, "set", wanted)
    return row if fits and store.buffer not in first.value.loads else None


def reading(member: Member, before: Sequence[Member], store: program.Store, column: Axis) -> Axis | None:
    """The axis with which an operation goes through the rows of a table, where it needs of each element that alone,
    goes through memory as the table does, and writes what nothing before it accesses: rows are finished one by one."""
    final = member.operation
    if not isinstance(final, Compute) or len(final.stores) != 1 or len(final.axes) != 2 or column not in final.axes:
        return None
    (last,), (row,) = final.stores, (item for item in final.axes if item is not column)
    wanted = tuple(row if isinstance(index, Data) else index for index in store.coordinates)
    accessed = {access.storage for each in before for access in each.accesses}
    tables = {access.storage for each in before for access in each.written}
    reads = [access for access in member.accesses if not access.writes and access.storage in tables]
    apart = last.mode == "set" and all(access.storage not in accessed for access in member.written)
    fits = reads and all((access.buffer, access.coordinates) == (store.buffer, wanted) for access in reads)
    along = all(step_of(access.place, column) in (ZERO, ONE) for access in member.accesses)
    return row if fits and apart and along else None


def sorted_scatter(scatter: SortedScatter, points: Sequence[Body], machine: Machine) -> Body:
    """The loops; nothing where the table's rows do not lie along memory. `points`: what is done at every point."""
    *before, store = points[0 if scatter.row is None else 1]
    assert isinstance(store, Store)
    (place,) = store.coordinates
    (where,) = (atom for atom in place.atoms if isinstance(atom, Data))
    if step_of(place, scatter.column) is not ONE:
        return ()
    count, row = scatter.count, axis("row", scatter.rows)
    here = substitute(place, {where: row})
    there: Expr = Load.intern(store.buffer, (here,), store.value.dtype)
    made, begun = [], there
    if scatter.row is not None:
        *made, fill = replaced(points[0], {scatter.row: row})
        assert isinstance(fill, Store)
        begun = fill.value

    def complete(value: Expr) -> Body:
        """What is done with an element of the table to which everything is added."""
        body: Body = ()
        if scatter.kept and value is not there:
            body = (Store(store.buffer, (here,), value),)
        if scatter.last is not None:
            body += tuple(with_values(item, {there: value}) for item in replaced(points[-1], {scatter.last: row}))
        return body

    one_by_one = axis("each", data(Local.intern("many", I64), number(count + 1)))
    spot = op("add", Local.intern("begin", I64), index_value(one_by_one))
    picked = Let("picked", cast(Load.intern("order", (data(spot, number(count)),), I32), I64))
    source = data(Local.intern("picked", I64), number(count))
    *then, added = replaced((*before, store), decoded(source, scatter.sources))
    assert isinstance(added, Store)
    each = Loop(one_by_one, "serial", (picked, *then, Update("total", (added.value,))))
    state = State(KINDS[store.mode], ("total",), (store.value.dtype,))
    total = Local.intern("total", store.value.dtype)
    summed: Body = (Accumulate((state,), (*made, Update("total", (begun,)), each)), *complete(total))
    limits = Load.intern("begins", (row,), I32), Load.intern("begins", (row + 1,), I32)
    lanes, many, none = lanes_for((store,), machine), Local.intern("many", I64), const(0, I64)
    inner: Body = (
        Let("begin", cast(limits[0], I64)),
        Let("many", op("sub", cast(limits[1], I64), Local.intern("begin", I64))),
        When(
            op("gt", many, none, dtype=torch.bool),
            (Loop(scatter.column, "vector", summed, lanes, machine.row_vectors_at_once),),
        ),
    )
    if alone := complete(begun):
        body = (Loop(scatter.column, "vector", (*made, *alone), lanes, machine.row_vectors_at_once),)
        inner += (When(op("eq", many, none, dtype=torch.bool), body),)
    assert isinstance(scatter.column.extent, Number)
    work = work_of((*before, store)) * scatter.column.extent.value * (1 + count // scatter.rows)
    return (*listed(scatter, where, machine), *shared([row], inner, work, machine))


def listed(scatter: SortedScatter, where: Data, machine: Machine) -> Body:
    """The numbers of the sources, those of one row of the table side by side in `order`, from `begins[row]` on."""
    count, rows = number(scatter.count), number(scatter.rows)
    zero, step = axis("cleared", scatter.rows + 2), axis("summed", scatter.rows + 1)
    row = data(Local.intern("row_of", I64), rows)
    named = Let("row_of", IndexValue.intern(where, I64))  # checked here, with the error of eager
    spot = Let("spot", cast(Load.intern("begins", (row + 1,), I32), I64))
    one = const(1, I32)
    flat: Index = ZERO
    for item in scatter.sources:
        flat = flat * item.extent + item
    into_list: tuple[Statement, ...] = (
        named,
        spot,
        Store("order", (data(Local.intern("spot", I64), count),), cast(index_value(flat), I32)),
        Store("begins", (row + 1,), one, "add"),
    )
    return (
        Scratch("begins", I32, (rows + 2,)),
        Scratch("order", I32, (count,)),
        Loop(zero, "vector", (Store("begins", (zero,), const(0, I32)),), 4, machine.row_vectors_at_once),
        *nested(scatter.sources, (named, Store("begins", (row + 2,), one, "add")), "serial"),
        Loop(step, "serial", (Store("begins", (step + 1,), Load.intern("begins", (step,), I32), "add"),)),
        *nested(scatter.sources, into_list, "serial"),
    )


def decoded(source: Index, axes: Sequence[Axis]) -> dict[Axis, Index]:
    """The places along several axes, from a number that counts all their points."""
    found: dict[Axis, Index] = {}
    for item in reversed(axes):
        found[item] = source % item.extent if item is not axes[0] else source
        source = source // item.extent
    return found
