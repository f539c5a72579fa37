"""The order of dimensions in memory that loops alone access: that of the tensors which the same loops access.

In: a program. Out: the same, with other strides of buffers that are neither seen outside nor through views. A buffer
keeps the order that eager gives it, unless every loop that accesses it accesses tensors of as many elements along one
other dimension: then its writer and its readers are one kernel, or at least none of them goes across memory. So a
contiguous value between tensors that are all channels-last becomes channels-last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ferrite.ir import ONE, ZERO, Axis, Index, contiguous_strides
from ferrite.ir.program import Buffer, Compute, Program, Reduce, Scan, reads, writes
from ferrite.schedule.fusion.accesses import BufferTable, MemoryAccess, axes_in, likely, step_of

LOOPS = (Compute, Reduce, Scan)


def with_layouts(program: Program, kept: Collection[str] = ()) -> Program:
    """The program with such buffers laid out anew; each loop has a vote on the dimension that is to be the fastest.
    `kept`: buffers that stay as they are."""
    free = free_buffers(program).difference(kept)
    if not free:
        return program
    buffer_table = BufferTable(program)
    votes: dict[str, set[int]] = {name: set() for name in free}  # dimensions that should be the fastest
    for operation in program.operations:
        if isinstance(operation, LOOPS):
            accesses = buffer_table.accesses(operation)
            if all(access.storage not in free for access in accesses):
                continue
            beside = [
                (axes_in(access.place), set(fast_axes(access))) for access in accesses if access.storage not in free
            ]
            for access in accesses:
                if access.storage in free:
                    votes[access.storage] |= set(wanted(access, beside)) or laid_out(
                        buffer_table.buffers[access.storage]
                    )
    new: dict[str, Buffer] = {}
    for name, dims in votes.items():
        buffer, chosen = buffer_table.buffers[name], next(iter(dims)) if len(dims) == 1 else -1
        if chosen >= 0 and buffer.strides[chosen] is not ONE:
            new[name] = turned(buffer, chosen)
    if not new:
        return program
    return replace(program, buffers=tuple(new.get(buffer.name, buffer) for buffer in program.buffers))


def free_buffers(program: Program) -> set[str]:
    """Buffers of two dimensions or more that loops alone access, and no view shows."""
    leaving = {name for name in program.outputs if isinstance(name, str)}
    viewed = {buffer.storage for buffer in program.buffers if buffer.storage != buffer.name}
    viewed |= {buffer.storage for buffer in program.buffers if buffer.name in leaving}
    found = {
        buffer.name
        for buffer in program.buffers
        if buffer.kind == "owned" and sum(size is not ONE for size in buffer.sizes) > 1
    }
    found -= viewed
    for operation in program.operations:
        if not isinstance(operation, LOOPS):
            found -= {access.buffer for access in (*reads(operation), *writes(operation))}
    return found


def fast_axes(access: MemoryAccess) -> Iterator[Axis]:
    """The axes along which accessed elements lie side by side."""
    for atom in access.place.atoms:
        if isinstance(atom, Axis) and step_of(access.place, atom) is ONE:
            yield atom


def wanted(access: MemoryAccess, beside: Sequence[tuple[frozenset[Axis], set[Axis]]]) -> Iterator[int]:
    """The dimensions along which others that have as many elements go in memory; -1 where that is not clear.
    `beside`: the axes of each of the others, and those along which it goes."""
    if any(index.atoms and not isinstance(index, Axis) for index in access.coordinates):
        yield -1
        return
    mine = axes_in(access.place)
    fast = {axis for theirs, along in beside if mine <= theirs for axis in along}
    yield from (dimension for dimension, index in enumerate(access.coordinates) if index in fast)


def laid_out(buffer: Buffer) -> set[int]:
    """The dimension that is the fastest where somebody has chosen it: who has no other wish wants that."""
    if buffer.strides == contiguous_strides(buffer.sizes):
        return set()
    return {
        dim
        for dim, (size, step) in enumerate(zip(buffer.sizes, buffer.strides, strict=True))
        if size is not ONE and step is ONE
    }


def turned(buffer: Buffer, fastest: int) -> Buffer:
    """The same memory, dense, with one dimension the fastest and the others as they were."""
    order = [place for place in range(len(buffer.sizes)) if place != fastest]
    order.sort(key=lambda place: (-likely(buffer.strides[place], 1 << 30), place))
    strides: list[Index] = [ZERO] * len(buffer.sizes)
    step: Index = ONE
    for place in (fastest, *reversed(order)):
        strides[place] = step
        step = step * buffer.sizes[place]
    return replace(buffer, strides=tuple(strides))
