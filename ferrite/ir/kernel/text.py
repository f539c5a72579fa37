"""Kernels as text that can be read back (`ferrite.ir.kernel.parse`), in Python syntax:

    def kernel(p0, p1, s0):
        s0 = symbol(1, 4096)
        p0 = pointer(f32, 'read')
        p1 = pointer(f32, 'write')
        for i0 in parallel(8):
            with amax(f32) as a0:
                for i1 in reduction(s0, lanes=4, copies=2):
                    v0: f32 = p0[i0*s0 + i1]
                    a0.update(v0)
            for i1 in vector(s0, lanes=4):
                v1: f32 = p0[i0*s0 + i1]
                v2: f32 = sub(v1, a0)
                p1[i0*s0 + i1] = v2

A grouped kernel says behind `warps` what the sizes of its problems are: `problems = [[768], [3072]]`. One whose
programs go through several blocks each says how many there are: `resident = 132`.

The values before a statement are those it evaluates: the next statement has its own. `let` keeps one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from ferrite.ir.expr import Expr
from ferrite.ir.kernel.nodes import (
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    Pointer,
    Prefetch,
    Scratch,
    State,
    Statement,
    Store,
    Update,
    When,
    walk,
)
from ferrite.ir.program.attention_text import attention_text
from ferrite.ir.program.spelling import Values, prefix_beside
from ferrite.ir.program.text import INDENT, block, comment
from ferrite.ir.types import short

Row = tuple[str, int | None, Expr | None]  # a line, the number of its statement, and the value that it computes


class Notes:
    """What lines of a kernel's text come from, written behind each of them while printing: the number of a statement
    in the order of `walk`, and the value of it that the line computes."""

    def __init__(self, kernel: Kernel, mark: str = "\0") -> None:
        self.mark, self.numbers = mark, statement_numbers(kernel)
        self.values: list[Expr] = []

    def statement(self, statement: Statement) -> str:
        return f"{self.mark}{self.numbers[id(statement)]}" if id(statement) in self.numbers else ""

    def value(self, note: str, value: Expr) -> str:
        """The note of a statement, or of another value in it, for a line that computes this value."""
        self.values.append(value)
        return f"{note.partition(':')[0]}:{len(self.values) - 1}" if note else ""

    def rows(self, lines: Iterable[str]) -> list[Row]:
        found: list[Row] = []
        for line in lines:
            text, _, note = line.partition(self.mark)
            number, _, value = note.partition(":")
            found.append((text, int(number) if number else None, self.values[int(value)] if value else None))
        return found


def kernel_text(kernel: Kernel) -> str:
    return "\n".join(_lines(kernel, None)) + "\n"


def kernel_rows(kernel: Kernel) -> list[Row]:
    """The lines of the text, each with what it comes from; None: of the head."""
    notes = Notes(kernel)
    return notes.rows(_lines(kernel, notes))


def statement_numbers(kernel: Kernel) -> dict[int, int]:
    """Of every statement, by its address: one that stands in a kernel twice has its first number."""
    numbers: dict[int, int] = {}
    for number, statement in enumerate(walk(kernel.body)):
        numbers.setdefault(id(statement), number)
    return numbers


def _lines(kernel: Kernel, notes: Notes | None) -> list[str]:
    names = [*(pointer.name for pointer in kernel.pointers), *(size.name for size in kernel.sizes)]
    head = [
        *(comment(origin).strip() for origin in kernel.origins if comment(origin)),
        f"def kernel({', '.join(names)}):",
    ]
    body = [
        *(size.declared for size in kernel.sizes),
        *(f"{item.name} = {pointer_text(item)}" for item in kernel.pointers),
        *([f"warps = {kernel.warps}"] if kernel.warps else []),
        *([f"problems = {list(map(list, kernel.problems))}"] if kernel.problems else []),
        *([f"resident = {kernel.resident}"] if kernel.resident else []),
        *_Statements(kernel, names, notes).block(kernel.body),
    ]
    return [*head, *(INDENT + line for line in body or ["pass"])]


def pointer_text(pointer: Pointer) -> str:
    hints = f"{', once=True' if pointer.once else ''}{', again=True' if pointer.again else ''}"
    return f"pointer({short(pointer.dtype)}, {pointer.access!r}{hints})"


def names_in(kernel: Kernel) -> Iterator[str]:
    """What statements name."""
    for statement in walk(kernel.body):
        match statement:
            case Loop(axis=axis):
                yield axis.name
            case Scratch(name=name) | Let(name=name):
                yield name
            case Attend():
                yield from (each.name for each in statement.inner)
            case Accumulate(states=states):
                yield from (name for state in states for name in state.names)


class _Statements:
    def __init__(self, kernel: Kernel, names: list[str], notes: Notes | None) -> None:
        self.notes = notes
        self.prefix = prefix_beside([*names, *names_in(kernel)])
        self.count = itertools.count()

    def block(self, body: tuple[Statement, ...]) -> list[str]:
        return [line for statement in body for line in self.lines(statement)]

    def lines(self, statement: Statement) -> list[str]:
        values = Values(self.prefix, self.count)
        if (notes := self.notes) is None:
            written = self.written(statement, values)
            return [*values.take(), *written]
        note = notes.statement(statement)
        values.note = lambda value: notes.value(note, value)
        written = self.written(statement, values)
        # those inside have theirs
        return [line if notes.mark in line else line + note for line in (*values.take(), *written)]

    def written(self, statement: Statement, values: Values) -> list[str]:
        match statement:
            case Loop(axis=axis):
                counts = [
                    f", {word}={count}" for word, count in (("lanes", statement.lanes), ("copies", statement.copies))
                ]
                shown = "".join(text for text in counts if not text.endswith("=1"))
                head = f"for {axis.name} in {statement.kind}({values.index(axis.extent)}{shown}):"
                return [head, *(INDENT + line for line in self.block(statement.body) or ["pass"])]
            case Scratch():
                sizes = ", ".join(map(values.index, statement.sizes))
                return [f"{statement.name} = scratch({short(statement.dtype)}, [{sizes}])"]
            case Let(name=name, value=value):
                return [f"{name}: {short(value.dtype)} = let({values.value(value)})"]
            case Accumulate(states=states):
                own = [line for state in states if state.combine for line in self.combine(state)]
                return block(", ".join(map(state_text, states)), [*own, *self.block(statement.body)], "")
            case Update():
                return [f"{statement.state}.update({', '.join(map(values.value, statement.values))})"]
            case Store():
                return [self.store(statement, values)]
            case When(condition=condition):
                head = f"if {values.value(condition)}:"
                return [head, *(INDENT + line for line in self.block(statement.body) or ["pass"])]
            case Prefetch():
                return [f"prefetch({values.element(statement.buffer, statement.coordinates)})"]
            case Attend():
                word, inside = attention_text(statement.operation, values)
                numbers = f"lanes={statement.lanes}, copies={statement.copies}"
                return block(f"{word.removesuffix(')')}, {numbers})", inside, "")
        raise TypeError(f"no text for {type(statement).__name__}")

    def store(self, store: Store, values: Values) -> str:
        value = values.value(store.value)
        place = values.element(store.buffer, store.coordinates)
        if store.mode == "set" and not store.atomic:
            return f"{place} = {value}"
        return f"{place}.{'atomic_' if store.atomic else ''}{store.mode}({value})"

    def combine(self, state: State) -> list[str]:
        values = Values(self.prefix, self.count)
        values.declare(*state.combine)
        results = f"results({', '.join(map(values.value, state.combine))})"
        return block(f"combine({state.names[0]})", [*values.take(), results], "")


def state_text(state: State) -> str:
    names = state.names[0] if len(state.names) == 1 else f"({', '.join(state.names)})"
    return f"{state.kind}({', '.join(map(short, state.dtypes))}) as {names}"
