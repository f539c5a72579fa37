"""What runs, in order: launches of kernels and calls of torch's, with what each reads, moves and computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ferrite.debug import Compiled, GraphDetails
from ferrite.ir.program import Allocate, Assert, Bind, Operation, Template, call_of, reads, writes
from ferrite.reports.costs import bytes_moved, flops_of
from ferrite.reports.data import Collective, Step
from ferrite.reports.sources import SourceLines
from ferrite.reports.texts import GraphTexts, runs_in_order, title_of
from ferrite.schedule import BufferTable, Launch, Plan, Run

CALL = re.compile(r"\b(op_\w+)\(")
STARTS, WAITS = "_c10d_functional.", "_c10d_functional.wait_tensor"


class Steps:
    def __init__(self, compiled: Compiled, texts: GraphTexts, places: SourceLines) -> None:
        self.compiled, self.texts, self.places = compiled, texts, places
        self.kernels = {pair: number for number, pair in enumerate(compiled.plan.kernels)}
        self.runs = {id(run): number for number, run in enumerate(runs_in_order(compiled.plan))}
        self.found: list[Step] = []
        self.operations: list[Operation | None] = []  # behind each step that is no launch
        self.in_run: dict[tuple[int, int], int] = {}  # the step of each launch of each run

    def all(self) -> list[Step]:
        self.add_plan(self.compiled.plan)
        return self.found

    def add_plan(self, plan: Plan) -> None:
        table, written = BufferTable(plan.program), dict[str, int]()
        regions = iter(plan.regions)
        for place, step in enumerate(plan.steps):
            if isinstance(step, Run):
                for number, launch in enumerate(step.launches):
                    self.add_launch(step, number, launch, table, written, next(regions, None))
                continue
            if place in plan.bodies:
                for body in plan.bodies[place]:
                    self.add_plan(body)
            elif not isinstance(step, Allocate | Bind | Assert):
                refusal = plan.not_compiled.get(place)
                self.add_operation(step, table, written, "" if refusal is None else refusal.reason)

    def add_launch(
        self,
        run: Run,
        number: int,
        launch: Launch,
        table: BufferTable,
        written: dict[str, int],
        region: int | None,
    ) -> None:
        pairs = list(zip(launch.kernel.arguments, launch.arguments, strict=False))
        read = [name for pointer, name in pairs if pointer.access != "write"]
        lines = dict.fromkeys(self.places.of(each.origin.line) for each in launch.operations)
        hints = self.compiled.hints
        self.in_run[self.runs[id(run)], number] = len(self.found)
        self.add(
            Step(
                kind="kernel",
                title=launch.name,
                kernel=self.kernels[launch.device, launch.kernel],
                run=self.runs[id(run)],
                region=region,
                nodes=tuple(sorted(self.texts.known(node for each in launch.operations for node in each.origin.nodes))),
                places=tuple(place for place in lines if place >= 0),
                reason="",
                reads=tuple(sorted({written[name] for name in read if name in written})),
                bytes=bytes_moved(launch.operations, table, set(launch.arguments), hints),
                flops=flops_of(launch.operations, hints),
            ),
            None,
        )
        written.update({name: len(self.found) - 1 for pointer, name in pairs if pointer.access != "read"})

    def add_operation(self, operation: Operation, table: BufferTable, written: dict[str, int], refusal: str) -> None:
        call = call_of(operation)
        read = {table.buffers[access.buffer].storage for access in reads(operation)}
        outside = read | {table.buffers[access.buffer].storage for access in writes(operation)}
        place = self.places.of(operation.origin.line)
        counted = [self.compiled.flops[node] for node in operation.origin.nodes if node in self.compiled.flops]
        self.add(
            Step(
                kind="template" if isinstance(operation, Template) else "call" if call is not None else "step",
                title=title_of(operation),
                kernel=-1,
                run=-1,
                region=None,
                nodes=tuple(sorted(self.texts.nodes_of(operation))),
                places=() if place < 0 else (place,),
                reason=refusal or (call.reason if call is not None else ""),
                reads=tuple(sorted({written[name] for name in read if name in written})),
                bytes=bytes_moved((operation,), table, outside, self.compiled.hints),
                flops=sum(counted) if counted else flops_of((operation,), self.compiled.hints),
            ),
            operation,
        )
        for access in writes(operation):
            written[table.buffers[access.buffer].storage] = len(self.found) - 1

    def add(self, step: Step, operation: Operation | None) -> None:
        self.found.append(step)
        self.operations.append(operation)

    # --- times --------------------------------------------------------------------------------------------------------

    def with_times(self, details: GraphDetails) -> list[Step]:
        """The steps with the time of each, where they were measured."""
        times = details.times
        if times is None:
            return self.found
        found = list(self.found)
        for (run, number), each in times.launches.items():
            if (place := self.in_run.get((run, number))) is not None:
                found[place] = replace(found[place], seconds=each.median, calls=each.count)
        for line, each in times.calls.items():
            if (place := self.call_at.get(line)) is not None:
                found[place] = replace(found[place], seconds=each.median, calls=each.count)
        return found

    @property
    def call_at(self) -> Mapping[int, int]:
        """The step of each line of the host program that calls an operator, by the number of the line, from 1: those of
        one operator stand in the order of its steps."""
        waiting: dict[str, Iterator[int]] = {}
        lines = self.compiled.executable.source.text.split("\n")
        found: dict[int, int] = {}
        for number, line in enumerate(lines, 1):
            if (match := CALL.search(line)) is None:
                continue
            name = match[1]
            if name not in waiting:
                waiting[name] = iter(self.steps_called(name))
            if (place := next(waiting[name], None)) is not None:
                found[number] = place
        return found

    def steps_called(self, name: str) -> list[int]:
        path = self.compiled.executable.source.operators.get(name)
        return [place for place, step in enumerate(self.found) if step.kernel < 0 and step.title == path]

    # --- communication ------------------------------------------------------------------------------------------------

    def collectives(self) -> tuple[Collective, ...]:
        """From what starts each to what waits for it."""
        found = []
        waits = [place for place, step in enumerate(self.found) if step.title.startswith(WAITS)]
        for place, step in enumerate(self.found):
            if not step.title.startswith(STARTS) or step.title.startswith(WAITS):
                continue
            last = next((wait for wait in waits if place in self.found[wait].reads), place)
            found.append(Collective(step.title, place, last, step.bytes, step.places))
        return tuple(found)
