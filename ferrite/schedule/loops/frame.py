"""The frame of a kernel: pointers to the memory that its statements access, and the sizes they need."""

from __future__ import annotations

from ferrite.ir import Load, Symbol, indices_of, symbols_in
from ferrite.ir.kernel import Attend, Pointer, Store, indices_in, nodes_in, walk
from ferrite.schedule.loops.axes import Body
from ferrite.schedule.loops.statements import LoopStatements


def pointers_of(made: LoopStatements, body: Body) -> tuple[Pointer, ...]:
    """The memory that a body still accesses. What is written first; then in the order of first use, not of names: equal
    kernels want equal orders."""
    needed = memory_of(body)
    pointers = []
    for name in sorted(made.types, key=lambda name: name not in made.written):
        if name in needed:
            access = ("both" if name in made.read else "write") if name in made.written else "read"
            pointers.append(Pointer(name, made.types[name], access))  # type: ignore[arg-type]
    return tuple(pointers)


def memory_of(body: Body) -> set[str]:
    """The names of all memory that statements read or write."""
    found = {statement.buffer for statement in walk(body) if isinstance(statement, Store)}
    attended = [each.operation for each in walk(body) if isinstance(each, Attend)]
    found |= {each.buffer for one in attended for each in one.destinations if each is not None}
    return found | {item.buffer for statement in walk(body) for item in nodes_in(statement) if isinstance(item, Load)}


def sizes_of(body: Body) -> tuple[Symbol, ...]:
    """The symbolic sizes that statements need, by name."""
    found: set[Symbol] = set()
    for statement in walk(body):
        for index in indices_in(statement):
            found.update(symbols_in(index))
        for item in nodes_in(statement):
            for index in indices_of(item):
                found.update(symbols_in(index))
    return tuple(sorted(found, key=lambda item: item.name))
