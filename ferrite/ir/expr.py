"""Scalar expressions: what one element is, as a typed graph over the elements of buffers.

    expr = Const(dtype, bits)                    a literal, by its bits: NaN and -0.0 keep theirs
         | IndexValue(index, dtype)              an index used as a number
         | Load(buffer, coordinates, dtype)      x[i0, i1 + 2]
         | Op(name, args, dtype)                 a scalar operator of `ferrite.ir.scalar`
         | Cast(arg, dtype)                      conversion of the value
         | Masked(mask, value, other)            `value` where mask holds, evaluated only there; else `other`
         | Random(kind, seed, counter, stream, dtype)    number `counter` of one of the streams that `seed` starts
         | Param(position, dtype)                an argument of a combine function
         | Local(name, dtype)                    what a kernel has named; programs have none

    index atom: Data(value, extent)              an integer read from memory, used as an index: 0 <= it < extent

Nodes are interned and typed; conversions are explicit. Coordinates are logical, one per dimension of the buffer: where
an element lies in memory is the buffer's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.ir.index.algebra import TEXT, Atom, Axis, Index, Number, Symbol, keep
from ferrite.ir.index.substitution import substitute
from ferrite.ir.intern import Interned
from ferrite.ir.types import bits_of, foldable, is_integer, short, value_of


class Expr(Interned):
    """One scalar. `loads`: the buffers it reads; `atoms`: what its indices depend on; `under`: the expressions right
    below it, those that its indices read from memory first."""

    __slots__ = ("atoms", "dtype", "loads", "under")
    dtype: torch.dtype
    loads: frozenset[str]
    atoms: frozenset[Atom]
    under: tuple[Expr, ...]

    def set(self, parts: Sequence[Expr], indices: Sequence[Index] = (), loads: frozenset[str] = frozenset()) -> None:
        atoms = frozenset[Atom]().union(*[part.atoms for part in parts], *[index.atoms for index in indices])
        if parts:
            loads = loads.union(*[part.loads for part in parts])
        under = tuple(parts)
        if indices and (values := [value for index in indices for value in data_of(index)]):
            loads = loads.union(*[value.loads for value in values])
            atoms = atoms.union(*[value.atoms for value in values])
            under = (*values, *under)
        keep(self, "loads", loads)
        keep(self, "atoms", atoms)
        keep(self, "under", under)

    @property
    def args(self) -> tuple[Expr, ...]:
        return ()

    def __str__(self) -> str:
        from ferrite.ir.program.line_text import expression_text

        return expression_text(self)


class Const(Expr):
    __slots__ = ("bits",)
    fields = ("dtype", "bits")
    bits: int

    def prepare(self) -> None:
        self.set(())

    @property
    def value(self) -> Any:
        return value_of(self.bits, self.dtype)


class IndexValue(Expr):
    __slots__ = ("index",)
    fields = ("index", "dtype")
    index: Index

    def prepare(self) -> None:
        self.set((), (self.index,))


class Load(Expr):
    __slots__ = ("buffer", "coordinates")
    fields = ("buffer", "coordinates", "dtype")
    buffer: str
    coordinates: tuple[Index, ...]

    def prepare(self) -> None:
        self.set((), self.coordinates, frozenset([self.buffer]))


class Op(Expr):
    __slots__ = ("name", "operands")
    fields = ("name", "operands", "dtype")
    name: str
    operands: tuple[Expr, ...]

    def prepare(self) -> None:
        self.set(self.operands)

    @property
    def args(self) -> tuple[Expr, ...]:
        return self.operands


class Cast(Expr):
    __slots__ = ("arg",)
    fields = ("arg", "dtype")
    arg: Expr

    def prepare(self) -> None:
        self.set((self.arg,))

    @property
    def args(self) -> tuple[Expr, ...]:
        return (self.arg,)


class Masked(Expr):
    __slots__ = ("mask", "other", "value")
    fields = ("mask", "value", "other", "dtype")
    mask: Expr
    value: Expr
    other: Expr

    def prepare(self) -> None:
        self.set((self.mask, self.value, self.other))

    @property
    def args(self) -> tuple[Expr, ...]:
        return (self.mask, self.value, self.other)


class Random(Expr):
    __slots__ = ("counter", "kind", "seed", "stream")
    fields = ("kind", "seed", "counter", "stream", "dtype")
    kind: str
    seed: Expr
    counter: Index
    stream: Index

    def prepare(self) -> None:
        self.set((self.seed,), (self.counter, self.stream))

    @property
    def args(self) -> tuple[Expr, ...]:
        return (self.seed,)


class Param(Expr):
    __slots__ = ("position",)
    fields = ("position", "dtype")
    position: int

    def prepare(self) -> None:
        self.set(())


class Local(Expr):
    __slots__ = ("name",)
    fields = ("name", "dtype")
    name: str

    def prepare(self) -> None:
        self.set(())


COMPLAINT = "IndexError: index {index} is out of bounds for dimension with size {size}"


class Data(Atom):
    """A value from memory as an index. Outside 0 <= value < extent the program stops with the error that eager raises.

    `complaint`: that error, as "IndexError: index {index} is out of bounds ... {size}". {index} is the value;
    {wrapped}, the value as it was before a negative one was counted from the end.
    """

    __slots__ = ("complaint", "extent", "value")
    fields = ("value", "extent", "complaint")
    value: Expr
    extent: Index
    complaint: str

    def prepare(self) -> None:
        high = None if self.extent.high is None else max(self.extent.high - 1, 0)
        self.set(0, high, isinstance(self.extent, Number))

    def spell(self, text: Callable[[Index], str]) -> str:
        return f"data({self.value}, {text(self.extent)}{complaint_text(self.complaint)})"


def data_atoms(index: Index) -> list[Data]:
    """What an index reads from memory, in the order of its text: sets have another one in every process."""
    found = [atom for atom in index.atoms if isinstance(atom, Data)]
    return sorted(found, key=TEXT) if len(found) > 1 else found


def data_of(index: Index) -> list[Expr]:
    """The values that an index reads from memory, in a stable order, those in the extents of others too."""
    return [value for atom in data_atoms(index) for value in (atom.value, *data_of(atom.extent))]


def complaint_text(complaint: str) -> str:
    """The last argument of `data` in a program's text; none where it says nothing of its own."""
    return "" if complaint == COMPLAINT else f", {complaint!r}"


# --- builders ---------------------------------------------------------------------------------------------------------


def const(value: bool | int | float | complex, dtype: torch.dtype) -> Const:
    return Const.intern(dtype, bits_of(value, dtype))


def op(name: str, *args: Expr, dtype: torch.dtype | None = None) -> Op:
    return Op.intern(name, args, dtype if dtype is not None else args[0].dtype)


def load(buffer: str, coordinates: Sequence[Index], dtype: torch.dtype) -> Load:
    return Load.intern(buffer, tuple(coordinates), dtype)


def index_value(index: Index, dtype: torch.dtype = torch.int64) -> Expr:
    return const(index.value, dtype) if isinstance(index, Number) else IndexValue.intern(index, dtype)


def cast(arg: Expr, dtype: torch.dtype) -> Expr:
    """Conversion; none where the type is right already, at once where the value is known."""
    if arg.dtype == dtype:
        return arg
    if isinstance(arg, Const) and foldable(arg.dtype) and foldable(dtype):
        value = arg.value
        if convertible(value, dtype):
            return const(value, dtype)
    return Cast.intern(arg, dtype)


def convertible(value: bool | int | float | complex, dtype: torch.dtype) -> bool:
    """Whether converting a number is the same everywhere: nothing is lost that machines treat differently."""
    if isinstance(value, complex):
        return dtype.is_complex or (value.imag == 0 and convertible(value.real, dtype))
    if isinstance(value, float) and is_integer(dtype) and dtype is not torch.bool:
        return value.is_integer() and abs(value) < 1 << 31 and (dtype.is_signed or value >= 0)
    return not (isinstance(value, float) and math.isnan(value))


def masked(mask: Expr, value: Expr, other: Expr) -> Expr:
    return Masked.intern(mask, value, other, value.dtype)


def data(value: Expr, extent: Index, complaint: str = COMPLAINT) -> Index:
    """A value from memory as an index below `extent`; one that is known, and proved to be inside, is that index."""
    from ferrite.ir.index.algebra import never_negative, number

    if isinstance(value, Const | IndexValue):
        index = value.index if isinstance(value, IndexValue) else number(value.value)
        if never_negative(index) and never_negative(extent - 1 - index):
            return index
    return Data.intern(value, extent, complaint)


# --- rewriting --------------------------------------------------------------------------------------------------------


def rewrite_indices(expr: Expr, new: Mapping[Any, Index]) -> Expr:
    """The expression with axes replaced, in coordinates and in the values that coordinates read."""
    if not new or expr.atoms.isdisjoint(new):
        return expr
    rewritten: dict[Expr, Expr] = {}

    def atom(old: Atom) -> Index:
        if isinstance(old, Data):
            return data(rebuilt(old.value), index(old.extent), old.complaint)
        return new.get(old, old)

    def index(old: Index) -> Index:
        if isinstance(old, Axis):
            return new.get(old, old)
        atoms = old.atoms
        if any(isinstance(each, Data) for each in atoms):
            return substitute(old, atom)
        return old if atoms.isdisjoint(new) else substitute(old, new)

    def rebuilt(item: Expr) -> Expr:
        found = rewritten.get(item)
        if found is None:
            found = rewritten[item] = item if item.atoms.isdisjoint(new) else with_parts(item, rebuilt, index)
        return found

    return rebuilt(expr)


def rewrite_loads(expr: Expr, new: Callable[[Load], Expr]) -> Expr:
    """The expression with every load replaced, inside coordinates too."""
    return rewrite_nodes(expr, lambda item: new(item) if isinstance(item, Load) else item)


def rewrite_nodes(expr: Expr, new: Callable[[Expr], Expr]) -> Expr:
    """The expression with every node replaced, operands first, inside coordinates too."""
    rewritten: dict[Expr, Expr] = {}

    def atom(old: Atom) -> Index:
        return data(rebuilt(old.value), old.extent, old.complaint) if isinstance(old, Data) else old

    def index(old: Index) -> Index:
        return substitute(old, atom) if any(isinstance(item, Data) for item in old.atoms) else old

    def rebuilt(item: Expr) -> Expr:
        found = rewritten.get(item)
        if found is None:
            found = rewritten[item] = new(with_parts(item, rebuilt, index))
        return found

    return rebuilt(expr)


def with_parts(item: Expr, expr: Callable[[Expr], Expr], index: Callable[[Index], Index]) -> Expr:
    """The same node over other parts."""
    match item:
        case Load():
            return Load.intern(item.buffer, tuple(map(index, item.coordinates)), item.dtype)
        case Op():
            return Op.intern(item.name, tuple(map(expr, item.operands)), item.dtype)
        case Cast():
            return cast(expr(item.arg), item.dtype)
        case Masked():
            return Masked.intern(expr(item.mask), expr(item.value), expr(item.other), item.dtype)
        case IndexValue():
            return index_value(index(item.index), item.dtype)
        case Random():
            return Random.intern(item.kind, expr(item.seed), index(item.counter), index(item.stream), item.dtype)
    return item


def describe(expr: Expr) -> str:
    """One word and a type, for messages."""
    return f"{type(expr).__name__.lower()}: {short(expr.dtype)}"


def nodes_of(*roots: Expr, leaving_out: Container[Expr] = ()) -> list[Expr]:
    """Every expression under these once, operands before users, those inside coordinates too."""
    seen: dict[Expr, None] = {}
    entered: set[Expr] = set()
    stack = list(reversed(roots))
    while stack:  # no recursion: expressions may be deep
        item = stack[-1]
        if item in seen or item in leaving_out:
            stack.pop()
        elif item in entered or not item.under:
            seen[item] = None
            stack.pop()
        else:
            entered.add(item)
            stack += reversed(item.under)
    return list(seen)


def indices_of(item: Expr) -> tuple[Index, ...]:
    """The index expressions that stand directly in a node."""
    if isinstance(item, Load):
        return item.coordinates
    if isinstance(item, IndexValue):
        return (item.index,)
    return (item.counter, item.stream) if isinstance(item, Random) else ()


def symbols_in(index: Index) -> Iterator[Symbol]:
    """The symbols of an index, those of the sizes that what it reads from memory stays below too."""
    for atom in index.atoms:
        if isinstance(atom, Symbol):
            yield atom
        elif isinstance(atom, Data):
            yield from symbols_in(atom.extent)
