"""Memory that is read, or returned, before anything is written to it: `torch.empty` and what is drawn into it.

Most memory is written first, and the memory planner places it. What is not, a call makes, so that everything a program
reads comes from somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferrite.ir.host import Literal, Sequence
from ferrite.ir.index import Index, Number
from ferrite.ir.program import Buffer, Call, CallArgument, Operation, Origin, Program, Size
from ferrite.ir.questions import reads, writes
from ferrite.lower.arguments import literal_text

REASON = "memory without contents"


def with_allocations(program: Program) -> Program:
    buffers = {buffer.name: buffer for buffer in program.buffers}
    written = {name for name, buffer in buffers.items() if buffer.kind != "owned"}
    operations: list[Operation] = []

    def allocate(names: Iterable[str], origin: Origin) -> None:
        for name in dict.fromkeys(buffers[name].storage for name in names):
            if name not in written:
                written.add(name)
                operations.append(allocation(buffers[name], origin))

    for operation in program.operations:
        allocate([access.buffer for access in reads(operation)], operation.origin)
        operations.append(operation)
        written |= {buffers[access.buffer].storage for access in writes(operation)}
    last = operations[-1].origin if operations else Origin()
    allocate([output for output in program.outputs if isinstance(output, str)], last)
    return replace(program, operations=tuple(operations)) if len(operations) > len(program.operations) else program


def allocation(buffer: Buffer, origin: Origin) -> Call:
    kinds = (("dtype", literal(buffer.dtype)), ("device", literal(buffer.device)))
    sizes = listed(buffer.sizes), listed(buffer.strides)
    return Call("aten.empty_strided.default", sizes, kinds, (buffer.name,), reason=REASON, origin=origin)


def listed(indices: Iterable[Index]) -> CallArgument:
    items = (Literal(str(item.value)) if isinstance(item, Number) else Size(item) for item in indices)
    return Sequence("list", tuple(items))  # type: ignore[arg-type]


def literal(value: object) -> Literal:
    text = literal_text(value)
    assert text is not None
    return Literal(text)
