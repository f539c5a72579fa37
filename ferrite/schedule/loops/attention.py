"""What attention has in common on all devices: where its operands lie, and the memory that a kernel of it is given."""

from __future__ import annotations

from dataclasses import replace

from ferrite.ir import (
    ONE,
    Axis,
    Expr,
    Index,
    Load,
    Number,
    axis,
    load,
    nodes_of,
    number,
    rewrite_indices,
    rewrite_loads,
)
from ferrite.ir.kernel import Pointer
from ferrite.ir.program import Attention, Destination
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.loops.axes import index_over


def with_places(operation: Attention, buffer_table: BufferTable) -> Attention:
    """With flat places in storages as coordinates."""

    def value(old: Expr) -> Expr:
        return rewrite_loads(old, placed)

    def placed(old: Load) -> Load:
        place = buffer_table.place(old.buffer, old.coordinates)
        return load(buffer_table.buffers[old.buffer].storage, [place], old.dtype)

    def destination(old: Destination) -> Destination:
        place = buffer_table.place(old.buffer, old.coordinates)
        return Destination(buffer_table.buffers[old.buffer].storage, (place,))

    return operation.rebuilt(value, destination=destination)


def pointers_of_attention(flat: Attention, buffer_table: BufferTable) -> tuple[Pointer, ...]:
    """The storages behind an operation that `with_places` has made: what is written first."""
    written = {each.buffer: buffer_table.dtype(each.buffer) for each in flat.destinations if each is not None}
    read = {each.buffer: each.dtype for each in nodes_of(*flat.values) if isinstance(each, Load)}
    pointers = [Pointer(name, dtype, "write") for name, dtype in written.items()]
    return (*pointers, *(Pointer(name, dtype, "read") for name, dtype in read.items()))


def with_heads_as_rows(operation: Attention, most: int) -> Attention:
    """Heads that share keys as rows of one head, where these are no more than are in a block together."""
    group, rows = operation.group.extent, operation.rows.extent
    if not isinstance(group, Number) or not isinstance(rows, Number) or group is ONE or operation.gradients is not None:
        return operation
    together = group.value * rows.value
    if together > most or (operation.lists and rows.value > operation.block_sides[0]):
        return operation
    if any(operation.group in value.atoms for each in operation.lists for value in (each.count, each.place)):
        return operation
    row = axis(operation.rows.name, number(together))
    new: dict[Axis, Index] = {operation.group: row // rows, operation.rows: row % rows}
    found = operation.rebuilt(
        lambda value: rewrite_indices(value, new),
        destination=lambda old: Destination(old.buffer, tuple(index_over(at, new) for at in old.coordinates)),
    )
    return replace(found, group=axis(operation.group.name, ONE), rows=row)
