"""When a program needs each buffer for the last time."""

from __future__ import annotations

from ferrite.ir.program.nodes import Program
from ferrite.ir.program.operation_facts import reads, writes

Frees = tuple[tuple[str, ...], ...]


def frees(program: Program) -> Frees:
    """For each operation, the buffers that nothing after it accesses; first those that no operation accesses at all."""
    base = {buffer.name: buffer.base for buffer in program.buffers}
    kept = {item for item in program.outputs if isinstance(item, str)}
    kept |= {owner for name in kept if (owner := base[name]) is not None}
    last = {item: 0 for item in program.inputs if isinstance(item, str)}
    for place, operation in enumerate(program.operations, start=1):
        for access in (*reads(operation), *writes(operation)):
            last[access.buffer] = place
            owner = base[access.buffer]
            if owner is not None:
                last[owner] = place
    dying: list[list[str]] = [[] for _ in range(len(program.operations) + 1)]
    for name, place in last.items():
        if name not in kept:
            dying[place].append(name)
    return tuple(map(tuple, dying))
