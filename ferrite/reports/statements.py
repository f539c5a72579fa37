"""Which nodes of the graph a statement of a kernel comes from.

A store comes from the operation that writes there; a reduction from the operation of its kind; what is computed on the
way, from what it is computed for; a loop from all that is in it; the rest from all that the kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ferrite.ir import Load, Local
from ferrite.ir.kernel import (
    Accumulate,
    Let,
    Scratch,
    Statement,
    Store,
    Update,
    inner,
    nodes_in,
    statement_numbers,
    walk,
)
from ferrite.ir.program import Operation, Reduce, Scan, writes
from ferrite.schedule import Launch
from ferrite.schedule.fusion import BufferTable

Nodes = frozenset[int]
EMPTY: Nodes = frozenset()
Known = Callable[[Iterable[str]], Nodes]  # nodes by their names


def nodes_by_statement(launch: Launch, table: BufferTable, known: Known) -> list[Nodes]:
    """For each statement of a launch, in the order of `walk`."""
    found = _Statements(launch, table, known)
    whole = known(node for each in launch.operations for node in each.origin.nodes)
    return [nodes or whole for nodes in found.all()]


class _Statements:
    def __init__(self, launch: Launch, table: BufferTable, known: Known) -> None:
        self.body, self.known = launch.kernel.body, known
        self.numbers = statement_numbers(launch.kernel)
        self.found: list[Nodes] = [EMPTY] * sum(1 for _ in walk(self.body))
        self.stored: dict[str, Nodes] = {}  # by pointer
        written: dict[str, Nodes] = {}
        for operation in launch.operations:
            for access in writes(operation):
                storage = table.buffers[access.buffer].storage
                written[storage] = written.get(storage, EMPTY) | self.nodes_of(operation)
        for pointer, name in zip(launch.kernel.arguments, launch.arguments, strict=False):
            self.stored[pointer.name] = self.stored.get(pointer.name, EMPTY) | written.get(name, EMPTY)
        self.reductions = [each for each in launch.operations if isinstance(each, Reduce | Scan)]
        self.updates: dict[str, Nodes] = {}  # by the name of a state
        self.users: dict[str, Nodes] = {}  # of local values and tiles: what they are computed for

    def all(self) -> list[Nodes]:
        for statement in walk(self.body):
            if isinstance(statement, Accumulate):
                for state in statement.states:
                    if (operation := self.reduction(state.kind)) is not None:
                        self.updates[state.names[0]] = self.nodes_of(operation)
        for statement in reversed(list(walk(self.body))):
            nodes = self.of(statement)
            self.found[self.numbers[id(statement)]] |= nodes
            for name in names_read(statement):
                self.users[name] = self.users.get(name, EMPTY) | nodes
        return self.found

    def of(self, statement: Statement) -> Nodes:
        """Of one whose users and insides are known."""
        match statement:
            case Store(buffer=buffer):
                return self.stored[buffer] if buffer in self.stored else self.users.get(buffer, EMPTY)
            case Let(name=name) | Scratch(name=name):
                return self.users.get(name, EMPTY)
            case Update(state=name):
                return self.updates.get(name, EMPTY)
        inside = EMPTY.union(*(self.found[self.numbers[id(each)]] for each in inner(statement)))
        if isinstance(statement, Accumulate):
            inside = inside.union(*(self.updates.get(state.names[0], EMPTY) for state in statement.states))
        return inside

    def reduction(self, kind: str) -> Operation | None:
        """The first operation of a kind that no other state has; without one of that kind, the first that is left."""
        chosen: Reduce | Scan | None
        chosen = next((each for each in self.reductions if isinstance(each, Reduce) and each.kind == kind), None)
        if chosen is None and self.reductions:
            chosen = self.reductions[0]
        if chosen is not None:
            self.reductions.remove(chosen)
        return chosen

    def nodes_of(self, operation: Operation) -> Nodes:
        return self.known(operation.origin.nodes)


def names_read(statement: Statement) -> Iterator[str]:
    """Local values and memory that a statement itself reads."""
    for item in nodes_in(statement):
        if isinstance(item, Local):
            yield item.name
        elif isinstance(item, Load):
            yield item.buffer
