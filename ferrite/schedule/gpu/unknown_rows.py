"""Rows that nobody knows the number of, and what columns of them come to, in one kernel.

A program goes through the rows of a piece and keeps what its columns have come to, as in `kept_columns`. Of pieces that
need not be equal, an operation on rows knows nothing; its rows become those of a piece here:

    columns[p, j] = sum(r: x[size*p + r, j] if size*p + r < n else 0)       y[i, j] = 2 * x[i, j], i below n

    =>  for p in parallel(pieces):
            for r in serial(min(size, max(n - size*p, 0))):
                y[size*p + r, j] = 2 * x[size*p + r, j];  columns[p, j] += x[size*p + r, j]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ferrite.ir import ZERO, Axis, Index, IndexValue, Masked, Op, axis, maximum, minimum
from ferrite.ir.program import Compute, LoopOperation, Reduce
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member, in_indices, moved
from ferrite.schedule.gpu.loop_ends import end_of_condition
from ferrite.schedule.loops.reductions import STORE_MODES, neutral_value


@dataclass(frozen=True)
class Pieces:
    """How a column reduction counts rows: as `place`, of a piece and a place in it, below `count`; `end`: places of a
    piece that are."""

    piece: Axis
    rest: Axis
    place: Index
    count: Index
    end: Index


def in_row_pieces(members: Sequence[Member], device: str = "cpu") -> Group | None:
    """A group of the members over rows in pieces; None where they are no such group."""
    pieces = [pieces_of(member.operation) for member in members]
    first = next((each for each in pieces if each is not None), None)
    if first is None or all(pieces):
        return None
    row_of = rows_of(members, pieces, first)
    if row_of is None:
        return None
    row = axis(first.rest.name, minimum(first.rest.extent, maximum(first.end, ZERO)))
    place = in_indices(first.place, {first.rest: row})
    found = Group((first.piece,), device=device)
    for member, mine, other in zip(members, pieces, row_of, strict=True):
        if mine is not None:
            if (mine.count, mine.piece.extent, mine.rest.extent) != (
                first.count,
                first.piece.extent,
                first.rest.extent,
            ):
                return None
            member = unmasked(member)
            new = {mine.piece: first.piece, mine.rest: row}
            found.add(moved(member, new, {old: (each,) for old, each in new.items()}))
        else:
            assert other is not None
            found.add(moved(member, {other: place}, {other: (first.piece, row)}))
    return found


def pieces_of(operation: LoopOperation) -> Pieces | None:
    """How a reduction of columns counts the rows of a piece, if it asks of each whether there is one."""
    if not isinstance(operation, Reduce) or operation.kind not in STORE_MODES or len(operation.reduced) != 1:
        return None
    (value,), (rest,) = operation.values, operation.reduced
    if not isinstance(value, Masked) or value.other != neutral_value(operation.kind, value.dtype):
        return None
    end = end_of_condition(value.mask, rest)
    if end is None or not isinstance(value.mask, Op):
        return None
    place, count = (each.index for each in value.mask.operands if isinstance(each, IndexValue))
    pieces = [atom for atom in place.atoms if isinstance(atom, Axis) and atom is not rest]
    return Pieces(pieces[0], rest, place, count, end) if len(pieces) == 1 else None


def rows_of(members: Sequence[Member], pieces: Sequence[Pieces | None], first: Pieces) -> list[Axis | None] | None:
    """The axis of each operation on rows that stands where column reductions have the rows of a piece."""
    known: set[tuple[str, int]] = set()
    row_of: list[Axis | None] = [None] * len(members)

    def take(member: Member, at: Index) -> None:
        for access in member.accesses:
            known.update((access.buffer, dim) for dim, each in enumerate(access.coordinates) if each is at)

    for member, mine in zip(members, pieces, strict=True):
        if mine is not None:
            take(member, mine.place)
    before = -1
    while before < len(known):
        before = len(known)
        for number, member in enumerate(members):
            if pieces[number] is None and row_of[number] is None:
                row_of[number] = row_in(member, known, first.count)
                if row_of[number] is not None:
                    take(member, row_of[number])  # type: ignore[arg-type]
    missing = [pieces[number] is None and row_of[number] is None for number in range(len(members))]
    return None if any(missing) else row_of


def row_in(member: Member, known: Iterable[tuple[str, int]], count: Index) -> Axis | None:
    if not isinstance(member.operation, Compute | Reduce):
        return None
    for access in member.accesses:
        for dim, at in enumerate(access.coordinates):
            if (access.buffer, dim) in known and isinstance(at, Axis) and at.extent is count and at in member.free:
                return at
    return None


def unmasked(member: Member) -> Member:
    operation = member.operation
    assert isinstance(operation, Reduce)
    (value,) = operation.values
    assert isinstance(value, Masked)
    return replace(member, operation=replace(operation, values=(value.value,)))
