"""The program, the kernels, the generated code and the host program as lines, with the nodes that each comes from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ferrite.debug import Compiled, GraphRow, KernelCode
from ferrite.ir.kernel import Kernel, kernel_rows, walk
from ferrite.ir.program import Operation, Program, call_of, program_rows, writes
from ferrite.reports.data import Text
from ferrite.reports.statements import EMPTY, Nodes, nodes_by_statement
from ferrite.schedule import Launch, Plan, Run, device_type
from ferrite.schedule.fusion import BufferTable

ASSIGNED = re.compile(r"\s*((?:\w+, )*\w+),? = ")
HEAD = re.compile(r"define |def ")  # of a function, in generated code
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
    """Of one graph. `rows`: its nodes, in order."""

    def __init__(self, compiled: Compiled, rows: Sequence[GraphRow]) -> None:
        self.program, self.plan, self.targets = compiled.program, compiled.plan, compiled.targets
        self.source = compiled.executable.source
        self.within = computed_within(self.program, rows)
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
        return EMPTY.union(*(self.within.get(name, EMPTY) for name in names))

    # --- the program --------------------------------------------------------------------------------------------------

    def add_program(self) -> int:
        by_buffer = nodes_by_buffer(self.program, self.known)
        operations = self.program.operations

        def nodes(line: str, operation: int | None) -> Nodes:
            if operation is not None:
                return self.nodes_of(operations[operation])
            name = line.strip().partition(" = ")[0]
            return by_buffer.get(name, EMPTY)

        return self.add("loop program", ((line, nodes(line, number)) for line, number in program_rows(self.program)))

    # --- kernels ------------------------------------------------------------------------------------------------------

    def add_kernels(self, pairs: Sequence[tuple[str, Kernel]]) -> list[tuple[int, int, str]]:
        """For each kernel the numbers of its text and of its code, and the language of that."""
        launches: dict[tuple[str, Kernel], list[Launch]] = {}
        for launch in self.plan.launches:
            launches.setdefault((launch.device, launch.kernel), []).append(launch)
        table = BufferTable(self.plan.program)
        found = []
        for number, (device, kernel) in enumerate(pairs):
            kernel = launches[device, kernel][0].kernel  # with origins
            named = f"kernel {number}"
            by_statement = [EMPTY] * sum(1 for _ in walk(kernel.body))
            whole = EMPTY
            for launch in launches[device, kernel]:
                whole |= self.known(node for each in launch.operations for node in each.origin.nodes)
                one = nodes_by_statement(launch, table, self.known)
                by_statement = [old | new for old, new in zip(by_statement, one, strict=True)]

            def nodes(statement: int | None, by: Sequence[Nodes] = by_statement, all_of_it: Nodes = whole) -> Nodes:
                return all_of_it if statement is None else by[statement]

            text = self.add(named, ((line, nodes(at)) for line, at in kernel_rows(replace(kernel, origins=()))))
            target = self.targets[device_type(device)]
            rows = [
                (line, EMPTY if at is None and not HEAD.match(line) else nodes(at))
                for line, at in code_rows(kernel, target, f"kernel_{number}")
            ]
            code = self.add(f"{named} as {target.language}", rows) if rows else -1
            found.append((text, code, target.language))
        return found

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


def computed_within(program: Program, rows: Sequence[GraphRow]) -> dict[str, Nodes]:
    """For each node what is computed where it is: itself, and what it reads that no operation stands for. Such a node
    is computed wherever it is used."""
    numbers = {row.name: number for number, row in enumerate(rows)}
    alone = {node for operation in program.operations for node in operation.origin.nodes}
    alone |= {row.name for row in rows if row.is_input}
    found: dict[str, Nodes] = {}
    for row in rows:
        if row.name in found:
            continue
        more = (found[each] for each in row.reads if each in found and each not in alone)
        found[row.name] = frozenset((numbers[row.name],)).union(*more)
    return found


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


def code_rows(kernel: Kernel, target: KernelCode, name: str) -> list[tuple[str, int | None]]:
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
