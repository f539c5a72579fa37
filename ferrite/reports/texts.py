"""The program, the kernels, the generated code and the host program as lines, with the nodes that each comes from."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ferrite.debug import Compiled, GraphRow, KernelCode
from ferrite.ir import Expr, nodes_of
from ferrite.ir.kernel import Kernel, Row, kernel_rows
from ferrite.ir.program import Operation, Program, call_of, program_rows, roots_of, writes
from ferrite.reports.data import Text
from ferrite.reports.statement_nodes import LaunchNodes, StatementNodes, nodes_of_launch
from ferrite.reports.value_nodes import EMPTY, ComputedValues, NodeNames, Nodes
from ferrite.schedule import Launch, Plan, Run, device_type
from ferrite.schedule.fusion import BufferTable

ASSIGNED = re.compile(r"\s*((?:\w+, )*\w+),? = ")
RUN = re.compile(r"\brun_(\d+)\(")


@dataclass
class Sets:
    """Sets of nodes, each once."""

    numbers: dict[Nodes, int] = field(default_factory=lambda: {EMPTY: 0})

    def of(self, nodes: Iterable[int]) -> int:
        return self.numbers.setdefault(frozenset(nodes), len(self.numbers))

    def data(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(each)) for each in self.numbers)


class GraphTexts:
    """Of one graph. `rows`: its nodes, in order; `computed`: what they were lowered to."""

    def __init__(self, compiled: Compiled, rows: Sequence[GraphRow], computed: Sequence[tuple[str, Expr]]) -> None:
        self.program, self.plan, self.targets = compiled.program, compiled.plan, compiled.targets
        self.source = compiled.executable.source
        self.names = NodeNames(self.program, rows)
        self.computed = ComputedValues((self.program, self.plan.program), computed, self.names)
        self.table = BufferTable(self.plan.program)
        self.sets = Sets()
        self.texts: list[Text] = []

    def add(self, title: str, rows: Iterable[tuple[str, Nodes]]) -> int:
        found = list(rows)
        marks = tuple(self.sets.of(nodes) for _, nodes in found)
        self.texts.append(Text(title, tuple(line for line, _ in found), marks))
        return len(self.texts) - 1

    def nodes_of(self, operation: Operation) -> Nodes:
        return self.known(operation.origin.nodes)

    def known(self, names: Iterable[str]) -> Nodes:
        return self.names.of(names)

    # --- the program --------------------------------------------------------------------------------------------------

    def add_program(self) -> int:
        by_buffer = nodes_by_buffer(self.program, self.known)
        operations = [self.nodes_in(operation) for operation in self.program.operations]
        found: list[tuple[str, Nodes]] = []
        before: int | None = None
        for line, number, value in program_rows(self.program):
            if number is None:
                nodes = by_buffer.get(line.strip().partition(" = ")[0], EMPTY)
            elif number != before:  # the line that it begins with: all of it
                nodes = self.nodes_of(self.program.operations[number]).union(*operations[number].values.values())
            else:
                nodes = operations[number].of(value)
            found.append((line, nodes))
            before = number
        return self.add("loop program", found)

    def nodes_in(self, operation: Operation) -> StatementNodes:
        near, memo = self.names.and_read(self.nodes_of(operation)), self.computed.memo
        values = [value for value in nodes_of(*roots_of(operation)) if value in memo]
        own = self.names.own(operation, self.computed.computed_by(values, memo, near))
        return StatementNodes(own, self.computed.by_value(values, memo, near, own))

    # --- kernels ------------------------------------------------------------------------------------------------------

    def add_kernels(self, pairs: Sequence[tuple[str, Kernel]]) -> list[tuple[int, int, str]]:
        """For each kernel the numbers of its text and of its code, and the language of that."""
        launches: dict[tuple[str, Kernel], list[Launch]] = {}
        for launch in self.plan.launches:
            launches.setdefault((launch.device, launch.kernel), []).append(launch)
        found = []
        for number, (device, kernel) in enumerate(pairs):
            kernel = launches[device, kernel][0].kernel  # with origins
            named = f"kernel {number}"
            nodes = functools.reduce(LaunchNodes.beside, (self.in_launch(each) for each in launches[device, kernel]))

            def of(line: str, at: int | None, value: Expr | None, nodes: LaunchNodes = nodes) -> Nodes:
                if at is not None:
                    return nodes.statements[at].of(value)
                return nodes.pointers.get(line.strip().partition(" = ")[0], nodes.whole)

            text = self.add(named, ((row[0], of(*row)) for row in kernel_rows(replace(kernel, origins=()))))
            target, name = self.targets[device_type(device)], f"kernel_{number}"
            begins = re.compile(rf"(define|def) .*\b{name}\b")  # its functions, but none of those that it calls
            rows = [
                (row[0], EMPTY if row[1] is None and not begins.match(row[0]) else of(*row))
                for row in code_rows(kernel, target, name)
            ]
            code = self.add(f"{named} as {target.language}", rows) if rows else -1
            found.append((text, code, target.language))
        return found

    def in_launch(self, launch: Launch) -> LaunchNodes:
        return nodes_of_launch(launch, self.table, self.names, self.computed)

    # --- the host program ---------------------------------------------------------------------------------------------

    def add_host(self) -> int:
        runs = [
            self.known(node for launch in run.launches for each in launch.operations for node in each.origin.nodes)
            for run in runs_in_order(self.plan)
        ]
        by_buffer = nodes_by_buffer(self.plan.program, self.known)
        for _, plan in plans_in_order(self.plan):
            by_buffer |= nodes_by_buffer(plan.program, self.known)

        def nodes(line: str) -> Nodes:
            if (run := RUN.search(line)) is not None and int(run[1]) < len(runs):
                return runs[int(run[1])]
            if (assigned := ASSIGNED.match(line)) is not None:
                return EMPTY.union(*(by_buffer.get(name, EMPTY) for name in assigned[1].split(", ")))
            return EMPTY

        lines = self.source.commented.rstrip("\n").split("\n")
        return self.add("host program", ((line, nodes(line)) for line in lines))


def digest_of(kernel: Kernel) -> str:
    return hashlib.blake2b(str(replace(kernel, origins=())).encode(), digest_size=6).hexdigest()


def nodes_by_buffer(program: Program, known: Callable[[Iterable[str]], Nodes]) -> dict[str, Nodes]:
    """The nodes that compute a buffer; of inputs, their own."""
    found: dict[str, Nodes] = {item: known((item,)) for item in program.inputs if isinstance(item, str)}
    for operation in program.operations:
        for access in writes(operation):
            found[access.buffer] = found.get(access.buffer, EMPTY) | known(operation.origin.nodes)
    for buffer in program.buffers:  # a view is of what its memory is of
        if buffer.name not in found:
            found[buffer.name] = found.get(buffer.storage, EMPTY)
    return found


def plans_in_order(plan: Plan, place: int = -1) -> Iterator[tuple[int, Plan]]:
    """As a host program is printed: bodies come first."""
    for number, plans in plan.bodies.items():
        for each in plans:
            yield from plans_in_order(each, number)
    yield place, plan


def runs_in_order(plan: Plan) -> list[Run]:
    return [step for _, each in plans_in_order(plan) for step in each.steps if isinstance(step, Run)]


def code_rows(kernel: Kernel, target: KernelCode, name: str) -> list[Row]:
    """Generated code; none where it cannot be made here."""
    try:
        return target.source_rows(kernel, name)
    except Exception:  # a page without the code of a kernel is better than none
        return []


def title_of(operation: Operation) -> str:
    """What a step that is no launch is called."""
    call = call_of(operation)
    if call is None:
        return type(operation).__name__.lower()
    return call.operator if isinstance(call.operator, str) else call.operator.name
