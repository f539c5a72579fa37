"""Memory that is read, or returned, before anything is written to it: `torch.empty` and what is drawn into it.

Most memory is written first, and the memory planner places it. What is not gets a step of its own, so that everything a
program reads comes from somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferrite.ir.program import Allocate, Operation, Origin, Program, reads, writes


def with_allocations(program: Program) -> Program:
    buffers = {buffer.name: buffer for buffer in program.buffers}
    written = {name for name, buffer in buffers.items() if buffer.kind != "owned"}
    operations: list[Operation] = []

    def allocate(names: Iterable[str], origin: Origin) -> None:
        for name in dict.fromkeys(buffers[name].storage for name in names):
            if name not in written:
                written.add(name)
                operations.append(Allocate(name, origin))

    for operation in program.operations:
        allocate([access.buffer for access in reads(operation)], operation.origin)
        operations.append(operation)
        written |= {buffers[access.buffer].storage for access in writes(operation)}
    last = operations[-1].origin if operations else Origin()
    allocate([output for output in program.outputs if isinstance(output, str)], last)
    return replace(program, operations=tuple(operations)) if len(operations) > len(program.operations) else program
