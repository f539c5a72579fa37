"""Kernels by position: what is local gets the name of its place, so that kernels that do the same are equal.

Pointers become p0, p1 and so on, sizes s0, axes i0 in the order of the loops, scratch t0, local values a0. The order of
pointers and sizes is the caller's, and stays. On a GPU, axes have the names of their depth: loops over one extent that
follow each other have one axis, so that what both of them load is seen to be the same; and of what sizes are likely to
be it is kept which power of two they are multiples of, up to 16 (of 56, `likely=8`), since code is made for such ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from ferrite.ir.expr import Data, Expr, Load, Local, data_of, nodes_of, with_parts
from ferrite.ir.index.algebra import Atom, Index, axis, symbol
from ferrite.ir.index.substitution import substitute
from ferrite.ir.kernel.nodes import (
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    Prefetch,
    Scratch,
    State,
    Statement,
    Store,
    Update,
    When,
)
from ferrite.ir.program.loop_operations import Attention, Destination

Body = tuple[Statement, ...]
ALIGNED_ELEMENTS = 16  # rows of a multiple of these begin where a vector can be loaded, in every type


def canonical(kernel: Kernel, one: Mapping[str, str] | None = None) -> Kernel:
    """`one`: pointers that are one with another, which is then for both. Every element is read there before it is
    written; whoever asks for it has seen to that."""
    one = one or {}
    names = _Names(by_depth=kernel.warps > 0)
    for size in kernel.sizes:
        power = math.gcd(size.likely or 1, ALIGNED_ELEMENTS) if kernel.warps > 0 else 1
        names.atoms[size] = symbol(names.new("s"), size.lowest, size.highest, power if power > 1 else None)
    pointers = tuple(
        replace(each, name=names.give(each.name, "p"), access="both" if each.name in one.values() else each.access)
        for each in kernel.pointers
        if each.name not in one
    )
    names.names.update({old: names.names[new] for old, new in one.items()})
    sizes = tuple(names.atoms[size] for size in kernel.sizes)
    return replace(kernel, pointers=pointers, sizes=sizes, body=names.body(kernel.body))  # type: ignore[arg-type]


class _Names:
    def __init__(self, by_depth: bool = False) -> None:
        self.by_depth, self.depth = by_depth, 0
        self.atoms: dict[Atom, Index] = {}
        self.names: dict[str, str] = {}
        self.counts = {prefix: itertools.count() for prefix in "psita"}

    def new(self, prefix: str) -> str:
        return f"{prefix}{next(self.counts[prefix])}"

    def give(self, old: str, prefix: str) -> str:
        self.names[old] = self.new(prefix)
        return self.names[old]

    def body(self, body: Body) -> Body:
        return tuple(map(self.statement, body))

    def statement(self, statement: Statement) -> Statement:
        match statement:
            case Loop():
                extent = self.index(statement.axis.extent)
                name = f"i{self.depth}" if self.by_depth else self.new("i")
                self.atoms[statement.axis] = renamed = axis(name, extent)
                self.depth += 1
                body = self.body(statement.body)
                self.depth -= 1
                return replace(statement, axis=renamed, body=body)
            case Scratch():
                sizes = tuple(map(self.index, statement.sizes))
                return replace(statement, name=self.give(statement.name, "t"), sizes=sizes)
            case Let():
                value = self.expr(statement.value)
                return Let(self.give(statement.name, "a"), value)
            case Accumulate():
                states = tuple(map(self.state, statement.states))
                return Accumulate(states, self.body(statement.body))
            case Update():
                return Update(self.names.get(statement.state, statement.state), tuple(map(self.expr, statement.values)))
            case Store():
                coordinates = tuple(map(self.index, statement.coordinates))
                buffer = self.names.get(statement.buffer, statement.buffer)
                return replace(statement, buffer=buffer, coordinates=coordinates, value=self.expr(statement.value))
            case Prefetch():
                buffer = self.names.get(statement.buffer, statement.buffer)
                return Prefetch(buffer, tuple(map(self.index, statement.coordinates)))
            case Attend():
                return replace(statement, operation=self.attention(statement))
            case When():
                return When(self.expr(statement.condition), self.body(statement.body))
        raise TypeError(f"no statement: {statement!r}")

    def attention(self, statement: Attend) -> Attention:
        for depth, old in enumerate(statement.inner, self.depth):
            extent = self.index(old.extent)
            self.atoms[old] = axis(f"i{depth}" if self.by_depth else self.new("i"), extent)

        def destination(old: Destination) -> Destination:
            return Destination(self.names.get(old.buffer, old.buffer), tuple(map(self.index, old.coordinates)))

        return statement.operation.rebuilt(self.expr, lambda old: self.atoms.get(old, old), destination)  # type: ignore[arg-type, return-value]

    def state(self, state: State) -> State:
        return replace(state, names=tuple(self.give(name, "a") for name in state.names))

    # --- expressions --------------------------------------------------------------------------------------------------

    def expr(self, root: Expr) -> Expr:
        return self.rebuilt([root])[root]

    def index(self, index: Index) -> Index:
        return self.new_index(index, self.rebuilt(data_of(index)))

    def rebuilt(self, roots: list[Expr]) -> dict[Expr, Expr]:
        renamed: dict[Expr, Expr] = {}
        for item in nodes_of(*roots):
            new = with_parts(item, renamed.__getitem__, lambda index: self.new_index(index, renamed))
            match new:
                case Load():
                    new = Load.intern(self.names.get(new.buffer, new.buffer), new.coordinates, new.dtype)
                case Local():
                    new = Local.intern(self.names.get(new.name, new.name), new.dtype)
            renamed[item] = new
        return renamed

    def new_index(self, index: Index, renamed: dict[Expr, Expr]) -> Index:
        def atom(old: Atom) -> Index:
            if isinstance(old, Data):
                return Data.intern(renamed[old.value], substitute(old.extent, atom), old.complaint)
            return self.atoms.get(old, old)

        return substitute(index, atom)
