"""What all parts of the generator share while a kernel is written: the module, the function, and the vector context.

A value is `parts`: one for each copy of the loops that are unrolled around (or a single one where all copies agree),
each a scalar, or a vector with the lanes of the one vector axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ferrite.codegen.llvm.function import Function
from ferrite.codegen.llvm.number_table import Numbers, table_texts
from ferrite.codegen.llvm.processor import Processor
from ferrite.codegen.llvm.types import is_literal, suffix, vector
from ferrite.ir import Axis

UNLIKELY = ", !prof !0"


@dataclass(frozen=True)
class Value:
    parts: tuple[str, ...]
    element: str
    lanes: int = 1

    @property
    def type(self) -> str:
        return vector(self.element, self.lanes)

    def as_scalars(self) -> Value:
        """The same names, where an operation has made one scalar of every vector."""
        return Value(self.parts, self.element)


@dataclass(frozen=True)
class AxisValue:
    """Where a loop stands: in copy r, lane k, it is base + shifts[r] + offsets[k].

    `aligned`: base + shift is a multiple of this many. `repeats`: lanes beyond the end have the offset of the last one
    that counts. `written_out`: the base is a number, and so many of them, from 0 on, are written one after the other.
    """

    base: str
    shifts: tuple[int, ...] = (0,)
    offsets: tuple[str, ...] = ("0",)
    aligned: int = 1
    repeats: bool = False
    written_out: int = 1

    @property
    def lanes(self) -> int:
        return len(self.offsets)


@dataclass
class Memory:
    """A pointer or a tile: `strides` give the flat place of coordinates; `version` counts what may have changed it;
    `bounds` are there where every access is to be compared with them."""

    pointer: str
    element: str
    strides: tuple[int, ...] = (1,)
    version: int = 0
    bounds: AddressBounds | None = None


@dataclass(frozen=True)
class AddressBounds:
    """The addresses between which memory may be touched, as values of 64 bits, and what a kernel gives where it would
    be read outside; where it would be written, one more."""

    low: str
    high: str
    code: int


@dataclass
class Module:
    processor: Processor
    name: str
    declares: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)  # functions of ours, by name
    functions: list[str] = field(default_factory=list)
    tile_code: int = 0  # what a kernel gives where a tile would be read outside; 0 where nobody looks
    numbers: Numbers = field(default_factory=dict)  # those in memory
    counter: Iterator[int] = field(default_factory=itertools.count)

    def text(self) -> str:
        head = [f'target triple = "{self.processor.triple}"', *table_texts(self.numbers)]
        tail = ['!0 = !{!"branch_weights", i32 1, i32 1000000}']
        return "\n".join([*head, *self.declares.values(), *self.helpers.values(), *self.functions, *tail]) + "\n"


@dataclass
class Emission:
    """`mask`: lanes that count, elsewhere memory must not be touched. `live`: lanes of a tail that are not just
    repetitions of another; those may read and write, but update no state."""

    module: Module
    function: Function
    lanes: int = 1
    replicas: int = 1
    mask: Value | None = None
    live: Value | None = None
    parallel: bool = False  # other threads run the same code
    names: dict[str, Value] = field(default_factory=dict)
    axes: dict[Axis, AxisValue] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)

    @property
    def processor(self) -> Processor:
        return self.module.processor

    # --- values -------------------------------------------------------------------------------------------------------

    def op(self, text: str, *operands: str) -> str:
        return self.function.op(text, *operands)

    def part(self, value: Value, replica: int, count: int, lanes: int) -> str:
        """One part, as wide as it is needed."""
        found = value.parts[replica * len(value.parts) // count]
        return found if value.lanes == lanes else self.splat(found, value.element, lanes)

    def splat(self, scalar: str, element: str, lanes: int) -> str:
        if lanes == 1:
            return scalar
        if is_literal(scalar):
            return f"splat ({element} {scalar})"
        wide = vector(element, lanes)
        first = self.op(f"insertelement {wide} poison, {element} {scalar}, i64 0", scalar)
        return self.op(f"shufflevector {wide} {first}, {wide} poison, <{lanes} x i32> zeroinitializer", first)

    def map(self, element: str, values: Sequence[Value], make: Callable[..., str]) -> Value:
        """A value made part by part: `make(lanes, *operands)`."""
        lanes, count = max(value.lanes for value in values), max(len(value.parts) for value in values)
        rows = range(count)
        parts = tuple(make(lanes, *(self.part(value, row, count, lanes) for value in values)) for row in rows)
        return Value(parts, element, lanes)

    def widened(self, value: Value, lanes: int) -> Value:
        if value.lanes == lanes:
            return value
        return Value(tuple(self.splat(part, value.element, lanes) for part in value.parts), value.element, lanes)

    def lane(self, vector_: str, element: str, lanes: int, place: int) -> str:
        if lanes == 1:
            return vector_
        if is_literal(vector_):
            if vector_.startswith("splat"):
                return vector_[len(f"splat ({element} ") : -1]
            return vector_[1:-1].split(", ")[place].removeprefix(f"{element} ")
        return self.op(f"extractelement {vector(element, lanes)} {vector_}, i64 {place}", vector_)

    def gathered(self, scalars: Sequence[str], element: str) -> str:
        """A vector of scalars."""
        if len(scalars) == 1:
            return scalars[0]
        wide, made = vector(element, len(scalars)), "poison"
        for place, scalar in enumerate(scalars):
            made = self.op(f"insertelement {wide} {made}, {element} {scalar}, i64 {place}", made, scalar)
        return made

    def here(self, name: str, type_: str) -> str:
        """A name that may belong to the function around."""
        return name if is_literal(name) else self.function.capture(name, type_)

    def local(self, name: str) -> Value:
        value = self.names[name]
        parts = tuple(self.here(part, value.type) for part in value.parts)
        return value if parts == value.parts else Value(parts, value.element, value.lanes)

    # --- calls --------------------------------------------------------------------------------------------------------

    def intrinsic(self, name: str, element: str, lanes: int, *operands: str) -> str:
        """One of LLVM's functions whose operands have the type of the result."""
        type_ = vector(element, lanes)
        full = f"@llvm.{name}.{suffix(element, lanes)}"
        self.declare(f"declare {type_} {full}({', '.join([type_] * len(operands))})")
        given = ", ".join(f"{type_} {operand}" for operand in operands)
        return self.op(f"call {type_} {full}({given})", *operands)

    def any_lane(self, mask: str, lanes: int, every: bool = False) -> str:
        """Whether a mask holds anywhere, or everywhere."""
        if lanes == 1:
            return mask
        word = "and" if every else "or"
        self.declare(f"declare i1 @llvm.vector.reduce.{word}.v{lanes}i1(<{lanes} x i1>)")
        return self.op(f"call i1 @llvm.vector.reduce.{word}.v{lanes}i1(<{lanes} x i1> {mask})", mask)

    def declare(self, line: str) -> None:
        self.module.declares.setdefault(line.partition("@")[2].partition("(")[0].partition(" ")[0], line)

    # --- branches -----------------------------------------------------------------------------------------------------

    @contextmanager
    def branch(self, condition: str) -> Iterator[None]:
        """Code that runs where a scalar condition holds."""
        function = self.function
        number = next(function.counter)
        yes, end = f"yes{number}", f"end{number}"
        function.line(f"br i1 {condition}, label %{yes}, label %{end}")
        scope = function.push(yes, branch=True)
        yield
        function.pop()
        function.scope.code += [f"{yes}:", scope.code, f"  br label %{end}"]
        function.block(end)
