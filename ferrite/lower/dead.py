"""Leave out what nobody reads: operations without effect whose results are never used, and buffers without use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ferrite.ir import Index, Symbol
from ferrite.ir.program import (
    Attention,
    Bind,
    Operation,
    Program,
    Reduce,
    Scalar,
    Scan,
    Sort,
    call_of,
    defines,
    has_effect,
    reads,
    symbols,
    writes,
)


def without_unused_targets(operation: Operation, used: Callable[[str], bool]) -> Operation:
    """Of several results (a greatest element and its place), those that somebody reads."""
    if not isinstance(operation, Reduce | Scan | Sort | Attention):
        return operation
    destinations = tuple(
        destination if destination is not None and used(destination.buffer) else None
        for destination in operation.destinations
    )
    return operation if destinations == operation.destinations else replace(operation, destinations=destinations)


def live_operations(program: Program) -> Program:
    """One walk backwards: an operation stays for its effect, for memory the caller sees, or for a later reader."""
    storage = {buffer.name: buffer.storage for buffer in program.buffers}
    buffers = {buffer.name: buffer for buffer in program.buffers}
    seen = {buffer.name for buffer in program.buffers if buffer.kind in ("input", "donated", "constant", "foreign")}
    wanted = {storage[item] for item in program.outputs if isinstance(item, str)}
    names = {item for item in program.outputs if isinstance(item, str)}
    numbers: set[Symbol] = set()

    def want(indices: tuple[Index, ...]) -> None:
        numbers.update(atom for index in indices for atom in index.atoms if isinstance(atom, Symbol))

    def want_buffer(name: str) -> None:
        names.add(name)
        wanted.add(storage[name])
        buffer = buffers[name]
        want((*buffer.sizes, *buffer.strides, buffer.offset))
        if buffer.base is not None and buffer.base not in names:
            want_buffer(buffer.base)

    for item in program.outputs:
        if isinstance(item, str):
            want_buffer(item)
        elif isinstance(item, Index):
            want((item,))
        elif isinstance(item, Scalar):
            numbers.update(atom for atom in item.value.atoms if isinstance(atom, Symbol))
            for name in item.value.loads:
                want_buffer(name)
    kept = []
    for operation in reversed(program.operations):
        written = [access.buffer for access in writes(operation)]
        call = call_of(operation)
        changes = call is not None and bool(call.writes)
        useful = (
            has_effect(operation)
            or changes
            or (
                not isinstance(operation, Bind)
                and any(storage[name] in wanted or storage[name] in seen for name in written)
            )
            or any(item in numbers for item in defines(operation))
        )
        if not useful:
            continue
        operation = without_unused_targets(operation, lambda name: storage[name] in wanted or storage[name] in seen)
        kept.append(operation)
        numbers.update(symbols(operation))
        for access in (*reads(operation), *writes(operation)):
            want_buffer(access.buffer)
    used = tuple(
        buffer
        for buffer in program.buffers
        if buffer.name in names or (buffer.name in seen and buffer.name in program.inputs)
    )
    return replace(program, operations=tuple(reversed(kept)), buffers=used)
