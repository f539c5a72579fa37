"""Attention on a CPU as loops: what can be a kernel, and how its rows are arranged.

Of many rows those of a block lie side by side in vectors (`attention_rows`); few of them, as in decoding, have vectors
along what is multiplied (`attention_few_rows`). Both go through the keys block by block, with running maxima.
"""

from __future__ import annotations

from ferrite.errors import Refusal
from ferrite.graph import HALVES
from ferrite.ir import ONE, ZERO, Axis, Index, Number, rewrite_indices
from ferrite.ir.kernel import Kernel
from ferrite.ir.program import Attention, Destination, Operation
from ferrite.machines import Machine
from ferrite.schedule.cpu.attention_few_rows import FewRows
from ferrite.schedule.cpu.attention_parts import F32, lies_along
from ferrite.schedule.cpu.attention_rows import RowBlocks
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.loops.attention import pointers_of_attention, with_places
from ferrite.schedule.loops.axes import index_over
from ferrite.schedule.loops.frame import memory_of, sizes_of
from ferrite.schedule.target import BuiltKernel

TYPES = (F32, *HALVES)


def refused(operation: Operation) -> Refusal | None:
    """Why attention is no kernel."""
    if not isinstance(operation, Attention):
        return None
    if operation.gradients is not None:
        return Refusal("gradients of attention have no kernel of their own on a cpu")
    types = {operation.query.dtype, operation.key.dtype, operation.value.dtype}
    if not types <= set(TYPES) or operation.score.dtype is not F32:
        return Refusal("attention of other types than floats of 16 or 32 bits")
    if not all(isinstance(each.extent, Number) for each in (operation.summed, operation.columns)):
        return Refusal("rows of attention whose length is known only when it runs")
    return None


def attention_kernel(group: Group, buffer_table: BufferTable, machine: Machine) -> BuiltKernel:
    (member,) = group.members
    operation = member.operation
    assert isinstance(operation, Attention)
    flat = without_single_axes(with_places(operation, buffer_table))
    body = blocks_of(flat, machine).loops()
    needed = memory_of(body)
    pointers = tuple(each for each in pointers_of_attention(flat, buffer_table) if each.name in needed)
    return BuiltKernel(Kernel(pointers, sizes_of(body), body, group.origins), tuple(each.name for each in pointers))


def blocks_of(flat: Attention, machine: Machine) -> RowBlocks:
    """Half a vector of rows, or fewer, are few."""
    high = flat.rows.extent.high
    lie_along = lies_along(flat.key, flat.summed) and lies_along(flat.value, flat.columns)
    is_few = high is not None and high <= machine.lanes(F32) // 2
    return FewRows(flat, machine) if is_few and lie_along else RowBlocks(flat, machine)


def without_single_axes(flat: Attention) -> Attention:
    """With the only place of axes that have one."""
    alone: dict[Axis, Index] = {each: ZERO for each in (*flat.axes, flat.group) if each.extent is ONE}
    return flat.rebuilt(
        lambda value: rewrite_indices(value, alone),
        destination=lambda old: Destination(old.buffer, tuple(index_over(each, alone) for each in old.coordinates)),
    )
