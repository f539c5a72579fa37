"""Operands on another device than the loop that reads them: a number in a tensor on the CPU beside a tensor on a GPU,
or indices on the CPU into one. Eager takes both; a kernel sees the memory of its own device alone, so what it reads
from elsewhere is copied there first.

    buf0 = compute(x[i] * scale[])            x on cuda:0, scale on the CPU

    scale_on_cuda_0 = copy(scale)
    buf0 = compute(x[i] * scale_on_cuda_0[])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ferrite.ir import ZERO, Expr, Index, IndexValue, Load, contiguous_strides, rewrite_loads
from ferrite.ir.program import (
    Attention,
    Buffer,
    Compute,
    Destination,
    DeviceCopy,
    LoopOperation,
    Operation,
    Program,
    Sort,
    reads,
    writes,
)


def with_operands_beside(program: Program) -> Program:
    """Every loop reads from the device that it writes to."""
    if len({buffer.device for buffer in program.buffers}) < 2:
        return program
    work = _Operands(program)
    operations = [new for operation in program.operations for new in work.rewritten(operation)]
    return replace(program, buffers=tuple(work.buffers.values()), operations=tuple(operations))


class _Operands:
    def __init__(self, program: Program) -> None:
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.copies: dict[tuple[str, torch.device], str] = {}

    def rewritten(self, operation: Operation) -> Iterator[Operation]:
        written = [self.buffers[access.buffer] for access in writes(operation)]
        if isinstance(operation, LoopOperation) and written:
            device = written[0].device
            apart = {name for access in reads(operation) if self.buffers[name := access.buffer].device != device}
            new = {}
            for name in sorted(apart):
                if (name, device) not in self.copies:
                    self.copies[name, device] = made = self.beside(self.buffers[name], device)
                    yield DeviceCopy(name, made, True, operation.origin)
                new[name] = self.copies[name, device]
            operation = reading(operation, new) if new else operation
        yield operation
        storages = {buffer.storage for buffer in written}
        if self.copies and storages:
            self.copies = {
                key: made for key, made in self.copies.items() if self.buffers[key[0]].storage not in storages
            }

    def beside(self, buffer: Buffer, device: torch.device) -> str:
        """A new buffer for the same elements, dense."""
        name = wish = f"{buffer.name}_on_{str(device).replace(':', '_')}"
        count = 0
        while name in self.buffers:
            count += 1
            name = f"{wish}_{count}"
        strides = contiguous_strides(buffer.sizes)
        self.buffers[name] = Buffer(name, buffer.dtype, buffer.sizes, strides, ZERO, device)
        return name


def reading(operation: LoopOperation, new: dict[str, str]) -> Operation:
    """The same operation on other buffers."""

    def load(old: Load) -> Expr:
        return Load.intern(new.get(old.buffer, old.buffer), old.coordinates, old.dtype)

    def value(old: Expr) -> Expr:
        return rewrite_loads(old, load)

    def index(old: Index) -> Index:
        found = value(IndexValue.intern(old, torch.int64))
        return found.index if isinstance(found, IndexValue) else old

    def destination(old: Destination | None) -> Destination | None:
        return None if old is None else replace(old, coordinates=tuple(map(index, old.coordinates)))

    match operation:
        case Compute():
            stores = [
                replace(store, coordinates=tuple(map(index, store.coordinates)), value=value(store.value))
                for store in operation.stores
            ]
            return replace(operation, stores=tuple(stores))
        case Sort():
            return replace(operation, keys=tuple(map(value, operation.keys)))
        case Attention():
            return operation.rebuilt(value)
    values, destinations = tuple(map(value, operation.values)), tuple(map(destination, operation.destinations))
    return replace(operation, values=values, destinations=destinations)
