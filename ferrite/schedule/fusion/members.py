"""One operation as a member of a group: its axes under names of their own, what it accesses, which axes are free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ferrite.errors import Refusal
from ferrite.ir import Axis, Index, Number, axis, rewrite_indices, substitute
from ferrite.ir.kernel import keeps_apart
from ferrite.ir.program import (
    Attention,
    Buffer,
    Compute,
    Destination,
    LoopOperation,
    Reduce,
    Scan,
    Store,
    axes_of,
    cost,
)
from ferrite.schedule.fusion.accesses import (
    UNKNOWN_EXTENT,
    BufferTable,
    MemoryAccess,
    axes_in,
    elements_are_apart,
    likely,
    likely_points,
    mixed_radix,
    only_row,
    step_of,
)


@dataclass(frozen=True)
class Member:
    """`free`: axes whose iterations write different elements, so that their order is free."""

    operation: LoopOperation
    axes: tuple[Axis, ...]
    accesses: tuple[MemoryAccess, ...]
    free: frozenset[Axis]

    @cached_property
    def cost(self) -> int:
        """Work at one point, in additions; a touch of memory counts as one."""
        return cost(self.operation) + len(self.accesses)

    @cached_property
    def points(self) -> int:
        return likely_points(self.axes)

    @cached_property
    def favourite(self) -> Axis | None:
        """The axis along which most of what is touched lies side by side: the one to make vectors of."""
        score: dict[Axis, int] = {}
        for access in self.accesses:
            for item in self.axes:
                if isinstance(item.extent, Number) and item.extent.value == 1:
                    continue
                step = step_of(access.place, item)
                if isinstance(step, Number) and step.value == 1:
                    size = math.prod(min(likely(each.extent), UNKNOWN_EXTENT) for each in axes_in(access.place))
                    score[item] = score.get(item, 0) + size * (3 if access.writes and not self.reduced else 2)
        # of equals the last: that is how memory is laid out most often
        return max(reversed(self.axes), key=lambda item: score.get(item, 0), default=None) if score else None

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return self.operation.reduced if isinstance(self.operation, Reduce) else ()

    @property
    def written(self) -> Iterator[MemoryAccess]:
        return (access for access in self.accesses if access.writes)

    def inner(self, rows: Iterable[Axis]) -> tuple[Axis, ...]:
        outer = set(rows)
        return tuple(item for item in self.axes if item not in outer)

    def renamed(self, new: Mapping[Axis, Axis], buffer_table: BufferTable) -> Member:
        if not new:
            return self
        return member_of(with_axes(self.operation, new), buffer_table)


class FreshAxes:
    """Axes that are like no other axis of the program."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def fresh(self, extent: Index) -> Axis:
        return axis(f"x{next(self.count)}", extent)

    def all_fresh(self, axes: Iterable[Axis]) -> dict[Axis, Axis]:
        return {item: self.fresh(item.extent) for item in axes}


def member_of(operation: LoopOperation, buffer_table: BufferTable) -> Member:
    accesses = buffer_table.accesses(operation)
    return Member(operation, axes_of(operation), accesses, free_axes(operation, accesses, buffer_table))


def with_axes(operation: LoopOperation, new: Mapping[Axis, Axis]) -> LoopOperation:
    """The same operation over other axes, one for each."""

    def renamed(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(new.get(item, item) for item in axes)

    return with_indices(operation, new, renamed)


def with_indices(
    operation: LoopOperation, new: Mapping[Axis, Index], renamed: Callable[[Iterable[Axis]], tuple[Axis, ...]]
) -> LoopOperation:
    """The same operation with indices in the place of axes, over the axes that `renamed` says for its own."""

    def index(old: Index) -> Index:
        return in_indices(old, new)

    def destination(old: Destination | None) -> Destination | None:
        return None if old is None else Destination(old.buffer, tuple(map(index, old.coordinates)))

    match operation:
        case Compute():
            stores = [
                Store(item.buffer, tuple(map(index, item.coordinates)), rewrite_indices(item.value, new), item.mode)
                for item in operation.stores
            ]
            return replace(operation, axes=renamed(operation.axes), stores=tuple(stores))
        case Reduce():
            values = tuple(rewrite_indices(item, new) for item in operation.values)
            destinations = tuple(map(destination, operation.destinations))
            axes, reduced = renamed(operation.axes), renamed(operation.reduced)
            return replace(operation, axes=axes, reduced=reduced, values=values, destinations=destinations)
        case Scan():
            values = tuple(rewrite_indices(item, new) for item in operation.values)
            destinations = tuple(map(destination, operation.destinations))
            (along,) = renamed((operation.along,))  # what is gone through in order stays one axis
            return replace(
                operation, axes=renamed(operation.axes), along=along, values=values, destinations=destinations
            )
        case Attention():
            names = dict(zip(operation.all_axes, renamed(operation.all_axes), strict=True))
            return operation.rebuilt(
                lambda value: rewrite_indices(value, new),
                lambda each: names[each],
                lambda old: Destination(old.buffer, tuple(map(index, old.coordinates))),
            )
    raise TypeError(f"{type(operation).__name__} is no loop that is scheduled")


def in_indices(old: Index, new: Mapping[Axis, Index]) -> Index:
    """A coordinate over other axes, inside what it reads from memory too."""
    from ferrite.ir import IndexValue

    if isinstance(old, Axis):
        return new.get(old, old)
    if not old.atoms:
        return old
    found = rewrite_indices(IndexValue.intern(old, torch.int64), new)
    return found.index if isinstance(found, IndexValue) else substitute(old, new)


def free_axes(
    operation: LoopOperation, accesses: tuple[MemoryAccess, ...], buffer_table: BufferTable
) -> frozenset[Axis]:
    match operation:
        case Reduce():
            return frozenset(operation.axes)
        case Scan():
            return frozenset(operation.axes) - {operation.along}
        case Attention():
            return frozenset(operation.axes)
    axes = frozenset(axes_of(operation))
    for access in accesses:
        if access.writes:
            axes &= deciding(access, axes, buffer_table.buffers[access.buffer])
    return axes


def deciding(access: MemoryAccess, axes: frozenset[Axis], buffer: Buffer) -> frozenset[Axis]:
    """The axes of which different values are at different elements, whatever the others are."""
    real = {item for item in axes if not (isinstance(item.extent, Number) and item.extent.value == 1)}
    idle = axes - real
    plain = {item for at in access.coordinates if (item := only_row(at, real)) is not None}
    if access.mode != "set" and not keeps_apart(access.place, plain):
        return idle
    if elements_are_apart(buffer):
        if real <= plain:
            return axes
    elif not mixed_radix(access.place, plain):
        plain = set()
    if mixed_radix(access.place, real):
        return axes
    return idle | plain


def moved(member: Member, new: Mapping[Axis, Index], over: Mapping[Axis, tuple[Axis, ...]]) -> Member:
    """A member with indices in the place of axes, over others."""

    def renamed(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        found = [over.get(item, (item,)) for item in axes]
        return tuple(each for some in found for each in some)

    operation = with_indices(member.operation, new, renamed)
    accesses = tuple(
        replace(access, coordinates=tuple(in_indices(at, new) for at in access.coordinates))
        for access in member.accesses
    )
    free = frozenset(renamed(item for item in member.axes if item in member.free))
    return Member(operation, renamed(member.axes), accesses, free)


def is_in_pieces(member: Member, rows: tuple[Axis, ...]) -> bool:
    """Whether a member reduces columns, and has more rows than these: pieces, which would not be shared."""
    if not member.reduced or member.favourite not in rows:
        return False
    return any(item in member.free and item not in member.reduced and item not in rows for item in member.axes)


def against_the_grain(members: list[Member], rows: tuple[Axis, ...]) -> Refusal | None:
    """Rows whose neighbours lie side by side are columns: only reductions and what is done once a row go together."""
    columns = [member for member in members if member.inner(rows) and member.favourite in rows]
    if not columns:
        return None
    across = [member for member in members if member.inner(rows) and member not in columns]
    if across or not all(isinstance(member.operation, Reduce | Scan) for member in columns):
        return Refusal("one goes along memory, the other across")
    return None
