"""Attention on a GPU: a program has a block of rows, and goes through the keys block by block, with running maxima.

    for b in parallel(2):
        for h in parallel(4):
            for g in parallel(1):
                for m in vector(2048, lanes=128):                 a block of rows is a program
                    with attention(..., lanes=64, copies=3):      64 keys at a time, three blocks of them under way

Scores are never in memory. With lists of blocks only those in them are gone through; where all of a block is allowed,
nobody asks. Gradients are two kernels: one for a block of rows, and one for a block of keys, which goes through rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ferrite.errors import Refusal
from ferrite.graph import HALVES
from ferrite.ir import Number
from ferrite.ir.kernel import Attend, Kernel, Loop
from ferrite.ir.program import Attention, Operation, Program
from ferrite.machines import MATRIX_UNIT_SIDE, AttentionBlocks, GpuMachine
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.gpu.blocks import power_above
from ferrite.schedule.loops.attention import pointers_of_attention, with_places
from ferrite.schedule.loops.axes import Body, nested
from ferrite.schedule.loops.frame import sizes_of
from ferrite.schedule.target import BuiltKernel

TYPES = (torch.float32, *HALVES)


def refused(operation: Operation) -> Refusal | None:
    """Why attention is no kernel."""
    if not isinstance(operation, Attention):
        return None
    types = {operation.query.dtype, operation.key.dtype, operation.value.dtype}
    if len(types) != 1 or not types <= set(TYPES) or operation.score.dtype is not torch.float32:
        return Refusal("matrix units multiply floats of 16 or 32 bits, both factors of one type")
    if not all(isinstance(each.extent, Number) for each in (operation.summed, operation.columns)):
        return Refusal("rows of attention whose length is known only when it runs")
    if operation.lists and min(map(two_in, operation.block_sides)) < MATRIX_UNIT_SIDE:
        return Refusal(f"blocks of {operation.block_sides}: matrix units multiply {MATRIX_UNIT_SIDE} at a time")
    return None


def with_apart_gradients(program: Program) -> Program:
    """Gradients of rows and those of keys in two operations: programs of one have rows, of the other keys."""

    def parts(operation: Operation) -> Iterator[Operation]:
        if not isinstance(operation, Attention) or operation.gradients is None:
            yield operation
            return
        query, key, value = operation.destinations
        if query is not None:
            yield replace(operation, destinations=(query, None, None), row_blocks=())
        if key is not None or value is not None:
            yield replace(operation, destinations=(None, key, value), key_blocks=())

    if not any(isinstance(each, Attention) for each in program.operations):
        return program
    return replace(program, operations=tuple(new for each in program.operations for new in parts(each)))


def attention_kernel(group: Group, buffer_table: BufferTable, machine: GpuMachine) -> BuiltKernel:
    (member,) = group.members
    operation = member.operation
    assert isinstance(operation, Attention)
    flat = with_places(operation, buffer_table)
    blocks = blocks_for(flat, machine)
    statement = Attend(flat, blocks.inner, blocks.stages)
    *parallel, last = statement.outer
    body: Body = (Loop(last, "vector", (statement,), blocks.outer),)
    body = nested(parallel, body, "parallel")
    pointers = pointers_of_attention(flat, buffer_table)
    kernel = Kernel(pointers, sizes_of(body), body, group.origins, blocks.warps)
    return BuiltKernel(kernel, tuple(each.name for each in pointers))


# --- blocks -----------------------------------------------------------------------------------------------------------


def blocks_for(operation: Attention, machine: GpuMachine) -> AttentionBlocks:
    """By the length of rows and what is computed, in blocks that divide those of the lists, and no larger than what
    there is."""
    width = max(likely_width(operation.summed.extent), likely_width(operation.columns.extent))
    by_keys = operation.gradients is not None and operation.destinations[0] is None
    blocks = machine.attention.blocks(operation.query.dtype.itemsize, width, operation.gradients is not None, by_keys)
    sides = operation.block_sides[::-1] if by_keys else operation.block_sides
    axes = (operation.keys, operation.rows) if by_keys else (operation.rows, operation.keys)
    lanes = []
    for wanted, side, each in zip((blocks.outer, blocks.inner), sides, axes, strict=True):
        if operation.lists:
            wanted = min(wanted, two_in(side))
        if isinstance(each.extent, Number):
            wanted = min(wanted, power_above(each.extent.value))
        lanes.append(max(wanted, MATRIX_UNIT_SIDE))
    return replace(blocks, outer=lanes[0], inner=lanes[1])


def likely_width(extent: object) -> int:
    return extent.value if isinstance(extent, Number) else 64


def two_in(side: int) -> int:
    """The largest power of two that divides a number."""
    return side & -side
