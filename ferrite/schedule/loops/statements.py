"""The statements of a nest: what is computed at each point, what goes into a state, what is stored once a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ferrite.ir import STATES, Axis, Expr, Index, Load, Local, cast, const, flat_place, index_value, op, rewrite_loads
from ferrite.ir.kernel import Let, State, Statement, Store, Update
from ferrite.ir.program import Compute, Mode, Reduce, Scan
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.placement import Placement
from ferrite.schedule.loops.scans import WIDER, scan_state

Key = tuple[str, Index]


@dataclass
class Parts:
    """`point`: at every point; `after`: when the states are complete."""

    point: list[Statement] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)


class LoopStatements:
    """Makes the statements of all nests of a group, in order: later nests use values of earlier ones."""

    def __init__(
        self,
        placement: Placement,
        buffer_table: BufferTable,
        rows: Sequence[Axis],
        wider: Mapping[torch.dtype, torch.dtype] = WIDER,
        short_places: bool = False,
    ) -> None:
        """`wider`: types in which the sums of scans grow. `short_places`: the place of the greatest has 32 bits where
        they hold it."""
        self.wider, self.short_places = wider, short_places
        self.placement, self.buffer_table, self.rows = placement, buffer_table, rows
        self.row_values: dict[Key, Local] = {}
        self.point_values: dict[Key, Local] = {}
        self.names = (f"v{count}" for count in itertools.count())
        self.types: dict[str, torch.dtype] = {}
        self.read: set[str] = set()
        self.written: set[str] = set()

    def add(self, other: LoopStatements) -> None:
        """What other statements of the same kernel access."""
        self.types |= other.types
        self.read |= other.read
        self.written |= other.written

    def nest(self, nest: Nest) -> Parts:
        self.point_values = {}
        parts = Parts()
        for member in nest.members:
            match member.operation:
                case Compute():
                    parts.point += self.compute(member.operation, row_level=nest.once_a_row)
                case Reduce():
                    self.reduce(member.operation, parts, row_level=not nest.outer)
                case Scan():
                    self.scan(member.operation, parts)
        return parts

    # --- expressions --------------------------------------------------------------------------------------------------

    def value(self, expr: Expr) -> Expr:
        return rewrite_loads(expr, self.loaded)

    def loaded(self, load: Load) -> Expr:
        storage = self.buffer_table.buffers[load.buffer].storage
        place = self.buffer_table.place(load.buffer, load.coordinates)
        found = self.point_values.get((storage, place)) or self.row_values.get((storage, place))
        if found is not None:
            return found
        tile = self.placement.tiles.get(storage)
        if tile is not None:
            return Load.intern(tile.name, tile.coordinates(load.coordinates), load.dtype)
        self.read.add(storage)
        self.types[storage] = load.dtype
        return Load.intern(storage, (place,), load.dtype)

    def coordinates(self, index: Index) -> Index:
        """A coordinate with what it reads from memory rewritten."""
        from ferrite.ir import IndexValue

        if not index.atoms:
            return index
        found = self.value(IndexValue.intern(index, torch.int64))
        assert isinstance(found, IndexValue)
        return found.index

    # --- stores -------------------------------------------------------------------------------------------------------

    def stored(self, buffer: str, at: Sequence[Index], value: Expr, mode: Mode = "set") -> Iterator[Statement]:
        storage = self.buffer_table.buffers[buffer].storage
        if storage in self.placement.values:
            return
        self.forget(storage, value)
        at = tuple(map(self.coordinates, at))
        tile = self.placement.tiles.get(storage)
        if tile is not None:
            yield Store(tile.name, tile.coordinates(at), value, mode)
            return
        self.written.add(storage)
        self.types[storage] = value.dtype
        if mode != "set":
            self.read.add(storage)
        yield Store(storage, (self.buffer_table.place(buffer, at),), value, mode)

    def forget(self, storage: str, stored: Expr) -> None:
        """What is known of a storage no longer holds when something is stored there, but for what that is.

        Not what is known of the same place either: what a row had there is no longer there when a point was stored.
        """
        for table in (self.point_values, self.row_values):
            for key in [key for key, value in table.items() if key[0] == storage and value is not stored]:
                del table[key]

    def named(self, value: Expr, key: Key, row_level: bool) -> tuple[list[Statement], Expr]:
        """A value that others may ask for, under a name of its own."""
        name = next(self.names)
        local = Local.intern(name, value.dtype)
        (self.row_values if row_level else self.point_values)[key] = local
        return [Let(name, value)], local

    def key(self, buffer: str, coordinates: Sequence[Index]) -> Key:
        return self.buffer_table.buffers[buffer].storage, self.buffer_table.place(buffer, coordinates)

    def compute(self, operation: Compute, row_level: bool) -> list[Statement]:
        """Every value first, then every store."""
        values = [self.value(store.value) for store in operation.stores]
        before: list[Statement] = []
        after: list[Statement] = []
        for store, value in zip(operation.stores, values, strict=True):
            if store.mode == "set":
                let, value = self.named(value, self.key(store.buffer, store.coordinates), row_level)
                before += let
            elif len(values) > 1:
                name = next(self.names)
                before.append(Let(name, value))
                value = Local.intern(name, value.dtype)
            after += self.stored(store.buffer, store.coordinates, value, store.mode)
        return before + after

    # --- states -------------------------------------------------------------------------------------------------------

    def reduce(self, operation: Reduce, parts: Parts, row_level: bool) -> None:
        values = [self.value(item) for item in operation.values]
        if operation.kind in ("any", "all"):
            values = [truth(item) for item in values]
        if operation.kind.startswith("arg"):
            place = flat_place(operation.reduced, [item.extent for item in operation.reduced])
            fits = self.short_places and place.high is not None and place.high < 1 << 31
            values.append(index_value(place, torch.int32 if fits else torch.int64))
        dtypes = state_types(operation.kind, values)
        state = State(operation.kind, tuple(next(self.names) for _ in dtypes), dtypes)
        parts.states.append(state)
        parts.point.append(Update(state.names[0], tuple(values)))
        for destination, name, dtype in zip(operation.destinations, state.names, dtypes, strict=True):
            if destination is None:
                continue
            result: Expr = cast(Local.intern(name, dtype), self.buffer_table.buffers[destination.buffer].dtype)
            if row_level:
                let, result = self.named(result, self.key(destination.buffer, destination.coordinates), True)
                parts.after += let
            parts.after += self.stored(destination.buffer, destination.coordinates, result)

    def scan(self, operation: Scan, parts: Parts) -> None:
        values = [self.value(item) for item in operation.values]
        names = [next(self.names) for _ in range(4)]
        state, contribution, results = scan_state(operation, values, names, self.wider)
        parts.states.append(state)
        parts.point.append(Update(state.names[0], contribution))
        for destination, result in zip(operation.destinations, results, strict=True):
            if destination is not None:
                value = cast(result, self.buffer_table.buffers[destination.buffer].dtype)
                parts.point += self.stored(destination.buffer, destination.coordinates, value)


def truth(value: Expr) -> Expr:
    return value if value.dtype is torch.bool else op("ne", value, const(0, value.dtype), dtype=torch.bool)


def state_types(kind: str, values: Sequence[Expr]) -> tuple[torch.dtype, ...]:
    if len(values) == STATES[kind].gives:
        return tuple(value.dtype for value in values)
    return (values[0].dtype,) * STATES[kind].gives
