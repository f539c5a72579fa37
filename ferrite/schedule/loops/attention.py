"""What attention has in common on all devices: where its operands lie, and the memory that a kernel of it is given."""

from __future__ import annotations

from ferrite.ir import Expr, Load, load, nodes_of, rewrite_loads
from ferrite.ir.kernel import Pointer
from ferrite.ir.program import Attention, Destination
from ferrite.schedule.fusion.accesses import BufferTable


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
