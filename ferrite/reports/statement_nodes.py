"""Which nodes of the graph a statement of a kernel comes from.

A store comes from the operation that writes there; a reduction from the operation over the same values; a value from
the node that computes it, or from what it is computed for; a loop from all that is in it; the rest from all that the
kernel computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ferrite.ir import Expr, Load, Local
from ferrite.ir.kernel import (
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
from ferrite.reports.value_nodes import EMPTY, ComputedValues, NodeNames, Nodes
from ferrite.schedule import Launch
from ferrite.schedule.fusion import BufferTable


@dataclass(frozen=True)
class StatementNodes:
    """Of one statement, and of the values in it."""

    nodes: Nodes
    values: Mapping[Expr, Nodes]

    def of(self, value: Expr | None) -> Nodes:
        return (EMPTY if value is None else self.values.get(value, EMPTY)) or self.nodes

    def beside(self, other: StatementNodes) -> StatementNodes:
        values = {value: nodes | other.values.get(value, EMPTY) for value, nodes in self.values.items()}
        return StatementNodes(self.nodes | other.nodes, values)


@dataclass(frozen=True)
class LaunchNodes:
    """Of a kernel: all of them, those of each statement in the order of `walk`, and those that read or write through
    each pointer."""

    whole: Nodes
    statements: Sequence[StatementNodes]
    pointers: Mapping[str, Nodes]

    def beside(self, other: LaunchNodes) -> LaunchNodes:
        """Of a kernel that is launched twice."""
        statements = [one.beside(two) for one, two in zip(self.statements, other.statements, strict=True)]
        pointers = {name: nodes | other.pointers[name] for name, nodes in self.pointers.items()}
        return LaunchNodes(self.whole | other.whole, statements, pointers)


def nodes_of_launch(launch: Launch, table: BufferTable, names: NodeNames, computed: ComputedValues) -> LaunchNodes:
    found = _Statements(launch, table, names, computed)
    found.all()
    statements = [
        StatementNodes(nodes or found.whole, values) for nodes, values in zip(found.found, found.values, strict=True)
    ]
    pointers = {
        name: (found.kept.get(name, EMPTY) | found.users.get(name, EMPTY)) or found.whole
        for name in (each.name for each in launch.kernel.pointers)
    }
    return LaunchNodes(found.whole, statements, pointers)


class _Statements:
    def __init__(self, launch: Launch, table: BufferTable, names: NodeNames, computed: ComputedValues) -> None:
        self.body, self.names, self.computed = launch.kernel.body, names, computed
        self.numbers = statement_numbers(launch.kernel)
        self.memo = computed.of_launch(launch)
        self.whole = names.of(node for each in launch.operations for node in each.origin.nodes)
        self.near = names.and_read(self.whole)
        self.with_values = computed.computed_by(self.memo, self.memo, self.near)
        self.whole |= self.with_values
        self.found: list[Nodes] = [EMPTY] * sum(1 for _ in walk(self.body))
        self.values: list[Mapping[Expr, Nodes]] = [{} for _ in self.found]
        self.stored: dict[str, Nodes] = {}  # by pointer
        written: dict[str, Nodes] = {}
        for operation in launch.operations:
            for access in writes(operation):
                storage = table.buffers[access.buffer].storage
                written[storage] = written.get(storage, EMPTY) | self.nodes_of(operation)
        for pointer, name in zip(launch.kernel.arguments, launch.arguments, strict=False):
            self.stored[pointer.name] = self.stored.get(pointer.name, EMPTY) | written.get(name, EMPTY)
        self.reductions = [each for each in launch.operations if isinstance(each, Reduce | Scan)]
        for each in self.reductions:
            computed.add(computed.memo, each.values, computed.leaf)
        self.updates: dict[str, Nodes] = {}  # by the name of a state
        self.kept: dict[str, Nodes] = {}  # in memory, tiles too
        self.users: dict[str, Nodes] = {}  # of local values and tiles: what they are computed for

    def all(self) -> None:
        for statement in walk(self.body):
            if isinstance(statement, Update):
                self.updates[statement.state] = self.updates.get(statement.state, EMPTY) | self.of_update(statement)
        for statement in reversed(list(walk(self.body))):
            number, nodes = self.numbers[id(statement)], self.of(statement)
            values = self.computed.by_value(nodes_in(statement), self.memo, self.near, nodes)
            self.values[number] = values
            if isinstance(statement, Let) or (isinstance(statement, Store) and statement.buffer not in self.stored):
                nodes = values[statement.value]
            self.found[number] |= nodes
            if isinstance(statement, Store):
                self.kept[statement.buffer] = self.kept.get(statement.buffer, EMPTY) | nodes
            for value, its in values.items():
                if isinstance(value, Local | Load):  # local values and memory that the statement itself reads
                    name = value.name if isinstance(value, Local) else value.buffer
                    self.users[name] = self.users.get(name, EMPTY) | its

    def of(self, statement: Statement) -> Nodes:
        """Of one whose users and insides are known."""
        match statement:
            case Store(buffer=buffer):
                return self.stored[buffer] if buffer in self.stored else self.users.get(buffer, EMPTY)
            case Scratch(name=name) if name in self.kept:
                return self.kept[name]
            case Let(name=name) | Scratch(name=name):
                return self.users.get(name, EMPTY)
            case Update(state=name):
                return self.updates[name] or self.users.get(name, EMPTY)
        within = [self.numbers[id(each)] for each in inner(statement)]
        values = (nodes for number in within for nodes in self.values[number].values())
        return EMPTY.union(*values, *(self.found[number] for number in within))

    def of_update(self, statement: Update) -> Nodes:
        """Of the reductions over these values; of a state that gathers the parts of another, of those of the parts.
        None where no operation has these values: then it is of what uses it."""
        value = statement.values[0]
        if isinstance(value, Local) and value.name in self.updates:
            return self.updates[value.name]
        numbers = [self.memo[each] for each in statement.values]
        found = (each for each in self.reductions if [self.computed.memo[one] for one in each.values] == numbers)
        return EMPTY.union(*map(self.nodes_of, found))

    def nodes_of(self, operation: Operation) -> Nodes:
        return self.names.own(operation, self.with_values)
