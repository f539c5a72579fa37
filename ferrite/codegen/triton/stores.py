"""Stores as lines of Triton source: into memory, into a tile, or combined atomically with what is there."""

from __future__ import annotations

from ferrite.codegen.triton.module import EVICT_FIRST, Module, Scope, Tile, Value
from ferrite.codegen.triton.operators import is_product
from ferrite.codegen.triton.values import Evaluation
from ferrite.errors import NotGenerated
from ferrite.graph import HALVES
from ferrite.ir import Expr, arithmetic_type, cast, load, op, short
from ferrite.ir.kernel import Kernel, Store
from ferrite.ir.program import OPERATOR_OF_MODE
from ferrite.schedule.gpu import ATOMIC_TYPES

ATOMIC_NAMES = {"add": "tl.atomic_add", "amax": "tl.atomic_max", "amin": "tl.atomic_min"}


class Stores:
    """Those of one kernel, which also says whether its blocks are stated, and which pointers are read and written."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module = module
        self.stated = kernel.warps > 0
        self.changing = {item.name for item in kernel.pointers if item.access == "both"}

    def store(self, store: Store, scope: Scope) -> None:
        tile = self.module.tiles.get(store.buffer)
        if store.atomic and store.mode != "set":
            self.atomic(store, scope)
            return
        evaluation = Evaluation(self.module, scope)
        what = store.value
        if store.mode != "set":
            what = combined(store)
        value = evaluation.value(what)
        if tile is not None:
            self.keep(store, tile, value, evaluation, scope)
            return
        pointer, guard, dims = evaluation.pointer(store.buffer, store.coordinates[0], scope.masks, scope.dims)
        masked = "" if guard is None else f", mask={guard}"
        if self.module.last_readers and self.module.loops:  # it would take the place of what is read again
            masked += EVICT_FIRST
        self.module.line(f"tl.store({pointer}, {value.at(max(dims, default=-1) + 1)}{masked})")
        self.changed(store.buffer)

    def changed(self, buffer: str) -> None:
        if buffer in self.changing:
            self.module.known.forget([buffer])

    def keep(self, store: Store, tile: Tile, value: Value, evaluation: Evaluation, scope: Scope) -> None:
        """Into a tile, which is a block."""
        if is_product(store.value, self.module.products):
            self.module.products.add(store.buffer)
        place = evaluation.tile(tile, store.coordinates)
        if place.dims != scope.dims:
            raise NotGenerated(f"scratch memory {store.buffer} is written by more lanes than it has")
        beyond = self.stated and all(mask.bounds is not None for mask in scope.masks)  # may hold anything
        counted = None if beyond else evaluation.guard(scope.masks, scope.dims)
        text = value.at(len(scope.axes))
        if counted is not None:
            text = f"tl.where({counted.at(len(scope.axes))}, {text}, {tile.text})"
        elif value.dims != scope.dims:
            text = f"tl.broadcast_to({text}, {scope.shape()})"
        self.module.line(f"{tile.text} = {text}")
        self.module.known.forget([store.buffer])

    def atomic(self, store: Store, scope: Scope) -> None:
        dtype = store.value.dtype
        if store.buffer in self.module.tiles or dtype not in ATOMIC_TYPES.get(store.mode, ()):
            raise NotGenerated(f"atomic {store.mode} of {short(dtype)}")
        evaluation = Evaluation(self.module, scope)
        value = evaluation.value(store.value)
        pointer, guard, dims = evaluation.pointer(store.buffer, store.coordinates[0], scope.masks, scope.dims)
        text = value.at(max(dims, default=-1) + 1)
        if value.dims != dims:
            text = f"tl.broadcast_to({text}, {scope.shape(dims)})"
        if dtype in HALVES:
            self.module.needs("atomic_add_half")
            counted = f"tl.full({scope.shape(dims)}, True, tl.int1)" if guard is None else guard
            self.module.line(f"atomic_add_half({pointer}, {text}, {counted})")
            self.changed(store.buffer)
            return
        masked = "" if guard is None else f", mask={guard}"
        self.module.line(f'{ATOMIC_NAMES[store.mode]}({pointer}, {text}{masked}, sem="relaxed")')
        self.changed(store.buffer)


def combined(store: Store) -> Expr:
    """What is there and what comes, in the type that arithmetic on them has."""
    dtype = store.value.dtype
    there = load(store.buffer, store.coordinates, dtype)
    wide = arithmetic_type(dtype)
    return cast(op(OPERATOR_OF_MODE[store.mode], cast(there, wide), cast(store.value, wide)), dtype)
