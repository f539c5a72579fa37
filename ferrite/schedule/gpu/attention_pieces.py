"""Attention of few rows, as in decoding: programs share the keys of a row, and another kernel makes one of the parts.

Each part is the result for its keys, and the logarithm of its sum of exponentials. What the parts come to is their sum,
weighted by 2 to the power of that. Before, the heads that share keys become rows of one block: a block of 16 rows that
has only one in it would be read for each head anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ferrite.ir import (
    ZERO,
    Axis,
    Expr,
    Index,
    Number,
    axis,
    cast,
    const,
    index_value,
    load,
    masked,
    minimum,
    number,
    op,
    rewrite_indices,
)
from ferrite.ir.program import Attention, BlockList, Compute, Destination, Operation, Reduce, Store
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import likely_points
from ferrite.schedule.gpu.attention import blocks_for

F32 = torch.float32
Part = Callable[[torch.dtype, tuple[Axis, ...]], Destination]  # memory for one number at every point
TypeOf = Callable[[str], torch.dtype]


def pieces_of(operation: Attention, machine: GpuMachine) -> int:
    """How many programs share the keys of a row: as many as keep all multiprocessors busy, each with some keys."""
    sizes = (*(each.extent for each in operation.axes), operation.group.extent, operation.rows.extent)
    keys = operation.keys.extent
    if operation.gradients is not None or not all(isinstance(size, Number) for size in (*sizes, keys)):
        return 1
    assert isinstance(keys, Number)
    blocks = blocks_for(operation, machine)
    programs = likely_points((*operation.axes, operation.group)) * -(-likely_points((operation.rows,)) // blocks.outer)
    most = keys.value // machine.attention.min_piece_keys
    if operation.lists:
        entries = [each.entry.extent for each in operation.key_blocks]
        most = min(most, *(each.value if isinstance(each, Number) else 1 for each in entries))
    wanted = 2 * machine.multiprocessors // max(programs, 1)
    return max(min(wanted, most), 1)


def with_shared_keys(operation: Attention, pieces: int, part: Part, type_of: TypeOf) -> Iterator[Operation]:
    """The parts, and what makes one of them."""
    one, piece = operation, axis("piece", number(pieces))
    around = (*one.axes, one.group, one.rows)
    result, logarithm, greatest = (part(F32, (piece, *axes)) for axes in ((*around, one.columns), around, around))
    wants_greatest = one.destinations[2] is not None
    destinations = (result, logarithm, greatest if wants_greatest else None)
    cut = with_entries_cut(one, piece) if one.lists else with_keys_cut(one, piece)
    yield replace(cut, axes=(*one.axes, piece), destinations=destinations)
    yield from joined(one, piece, (result, logarithm, greatest), part, type_of)


def with_keys_cut(one: Attention, piece: Axis) -> Attention:
    """A part of the keys for each piece; those beyond the end are not allowed, and not read."""
    extent = one.keys.extent
    keys = axis(one.keys.name, (extent + (piece.extent - 1)) // piece.extent)
    place = piece * keys.extent + keys
    new: dict[Axis, Index] = {one.keys: place}
    inside = op("lt", index_value(place), index_value(extent), dtype=torch.bool)
    is_whole = extent % piece.extent is ZERO

    def read(value: Expr) -> Expr:
        value = rewrite_indices(value, new)
        return value if is_whole else masked(inside, value, const(0.0, value.dtype))

    allowed = rewrite_indices(one.allowed, new)
    score = rewrite_indices(one.score, new)
    if not is_whole:
        allowed = masked(inside, allowed, const(False, torch.bool))
        score = masked(inside, score, const(0.0, score.dtype))
    return replace(one, keys=keys, key=read(one.key), value=read(one.value), score=score, allowed=allowed)


def with_entries_cut(one: Attention, piece: Axis) -> Attention:
    """A part of each list for each piece."""

    def cut(each: BlockList) -> BlockList:
        extent = each.entry.extent
        entry = axis(each.entry.name, (extent + (piece.extent - 1)) // piece.extent)
        first = piece * entry.extent
        place = rewrite_indices(each.place, {each.entry: minimum(first + entry, extent - 1)})
        left = op("sub", cast(each.count, torch.int64), index_value(first))
        count = op("maximum", op("minimum", left, index_value(entry.extent)), const(0, torch.int64))
        return BlockList(entry, count, place, each.whole)

    return replace(one, key_blocks=tuple(map(cut, one.key_blocks)))


def joined(
    one: Attention, piece: Axis, parts: tuple[Destination, ...], part: Part, type_of: TypeOf
) -> Iterator[Operation]:
    """The whole from its parts. A row of which no part has anything has a sum of 0."""
    around = (*one.axes, one.group, one.rows)
    result, logarithm, greatest = parts
    top, total, weighted = (part(F32, axes) for axes in (around, around, (*around, one.columns)))

    def read(place: Destination) -> Expr:
        return load(place.buffer, place.coordinates, F32)

    def reduced(kind: str, value: Expr, axes: tuple[Axis, ...], to: Destination) -> Reduce:
        return Reduce(axes, (piece,), kind, (value,), (to,), one.origin)

    nothing = const(float("-inf"), F32)
    safe = op("where", op("eq", read(top), nothing, dtype=torch.bool), const(0.0, F32), read(top), dtype=F32)
    weight = op("exp2", op("sub", read(logarithm), safe))
    yield reduced("amax", read(logarithm), around, top)
    yield reduced("sum", weight, around, total)
    yield reduced("sum", op("mul", read(result), weight), (*around, one.columns), weighted)
    zero = op("eq", read(total), const(0.0, F32), dtype=torch.bool)
    divisor = op("where", zero, const(1.0, F32), read(total), dtype=F32)
    values = (op("div", read(weighted), divisor), op("add", read(top), op("log2", read(total))))
    for number_of, value in enumerate(values):
        target = one.destinations[number_of]
        if target is not None:
            store = Store(target.buffer, target.coordinates, cast(value, type_of(target.buffer)))
            yield Compute(one.result_axes(number_of), (store,), one.origin)
    if one.destinations[2] is not None:
        yield reduced("amax", read(greatest), around, one.destinations[2])
