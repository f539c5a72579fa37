"""Small tables that are computed again by whoever reads them.

    scale[c] = 1 / sqrt(variance[c] + eps) * weight[c]          y[n, c, i] = max((x[n, c, i] - mean[c]) * scale[c], 0)
    =>      y[n, c, i] = max((x[n, c, i] - mean[c]) * (1 / sqrt(variance[c] + eps) * weight[c]), 0)

Alone, such a table is a launch of a few elements, which takes longer than all the arithmetic that it saves; in one
kernel with its reader it leaves only as many programs as it has elements. What a kernel makes is left: a table of that
is part of that kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ferrite.ir import (
    OPERATORS,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Masked,
    Op,
    data_of,
    nodes_of,
    rewrite_indices,
    rewrite_loads,
)
from ferrite.ir.program import Buffer, Compute, Operation, Program, Reduce, Scan, Sort, axes_of, reads, writes
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely_points
from ferrite.schedule.gpu.products import is_product

PLAIN = (Op, Cast, Masked, Load, Const, IndexValue)
LOOPS = (Compute, Reduce, Scan, Sort)


@dataclass(frozen=True)
class Table:
    operation: Compute

    def at(self, load: Load) -> Expr:
        return rewrite_indices(
            self.operation.stores[0].value, dict(zip(self.operation.axes, load.coordinates, strict=True))
        )


def with_small_tables_recomputed(program: Program, device: str, machine: GpuMachine) -> Program:
    buffers = {buffer.name: buffer for buffer in program.buffers}
    candidates = {
        place: each for place, each in enumerate(program.operations) if is_small_table(each, buffers, device, machine)
    }
    if not candidates:
        return program
    uses = Uses(program, buffers, machine)
    tables = {
        each.stores[0].buffer: Table(each)
        for place, each in candidates.items()
        if isinstance(each, Compute) and uses.recomputable(place, each)
    }
    operations = (
        recomputed(operation, tables)
        for operation in program.operations
        if not (isinstance(operation, Compute) and operation.stores[0].buffer in tables)
    )
    return replace(program, operations=tuple(operations)) if tables else program


def is_small_table(operation: Operation, buffers: Mapping[str, Buffer], device: str, machine: GpuMachine) -> bool:
    """Whether an operation computes all of a tensor of the program's own, element by element, with little work."""
    if not isinstance(operation, Compute) or len(operation.stores) != 1:
        return False
    (store,) = operation.stores
    buffer = buffers[store.buffer]
    if buffer.kind != "owned" or buffer.device.type != device or not buffer.dtype.is_floating_point:
        return False
    whole = store.coordinates == operation.axes and tuple(item.extent for item in operation.axes) == buffer.sizes
    if store.mode != "set" or not whole or not store.value.loads:
        return False
    nodes = nodes_of(store.value)
    loads = [item for item in nodes if isinstance(item, Load)]
    if (
        not all(isinstance(item, PLAIN) for item in nodes)
        or len(loads) > machine.max_table_loads
        or any(data_of(at) for item in loads for at in item.coordinates)
    ):
        return False
    work = sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in nodes)
    return work <= machine.max_table_additions


class Uses:
    """Which operations write and read each storage."""

    def __init__(self, program: Program, buffers: Mapping[str, Buffer], machine: GpuMachine) -> None:
        self.operations, self.buffers, self.machine = program.operations, buffers, machine
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for place, operation in enumerate(program.operations):
            for access in writes(operation):
                self.writers.setdefault(buffers[access.buffer].storage, []).append(place)
            for access in reads(operation):
                self.readers.setdefault(buffers[access.buffer].storage, []).append(place)
        self.seen = {buffers[name].storage for name in program.outputs if isinstance(name, str) and name in buffers}
        self.seen |= {buffer.base for buffer in program.buffers if buffer.base is not None}

    def recomputable(self, place: int, table: Compute) -> bool:
        (store,) = table.stores
        readers = self.readers.get(store.buffer, [])
        if store.buffer in self.seen or self.writers[store.buffer] != [place] or not readers:
            return False
        return all(self.is_larger(self.operations[each], table) for each in readers) and all(
            self.is_given(self.buffers[name].storage, place) for name in store.value.loads
        )

    def is_larger(self, reader: Operation, table: Compute) -> bool:
        if not isinstance(reader, Compute | Reduce) or is_product(reader):  # each block of which would compute it anew
            return False
        return likely_points(axes_of(reader)) >= self.machine.min_table_readers * likely_points(table.axes)

    def is_given(self, storage: str, place: int) -> bool:
        """Whether no kernel makes it, and nothing writes it later on."""
        written = self.writers.get(storage, [])
        return all(each < place and not isinstance(self.operations[each], LOOPS) for each in written)


def recomputed(operation: Operation, tables: Mapping[str, Table]) -> Operation:
    def value(load: Load) -> Expr:
        return tables[load.buffer].at(load) if load.buffer in tables else load

    match operation:
        case Compute() if reads_any(tables, [store.value for store in operation.stores]):
            stores = (replace(store, value=rewrite_loads(store.value, value)) for store in operation.stores)
            return replace(operation, stores=tuple(stores))
        case Reduce() if reads_any(tables, operation.values):
            return replace(operation, values=tuple(rewrite_loads(item, value) for item in operation.values))
    return operation


def reads_any(tables: Mapping[str, Table], values: Sequence[Expr]) -> bool:
    return any(name in tables for item in values for name in item.loads)
