"""A compiled graph as an entry of the cache, and back.

    sections    object code of each kernel and of the driver; the host program compiled by Python; constants that
                compiling made
    metadata    text of the host program, operators by path, tables of runs, small programs as text, what kernels say
                where a check fails, where objects are, and the record of what was compiled

Lines of the model are not part of the key, so an entry does not hold them: it names nodes of the captured graph by
their places, and whoever loads it takes the lines from his own graph. So a file that was edited above a model still
finds the entry, and tracebacks and records name the lines as they are now. Names of nodes in the record are those of
the graph that was compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ferrite.codegen.native import KernelCall, NativeSource, RunTable
from ferrite.debug.record import EagerCall, GraphRecord, Kernel, Memory
from ferrite.graph import ModelLine
from ferrite.graph.places import Index, Places
from ferrite.ir.expr import Expr
from ferrite.ir.index import Symbol
from ferrite.ir.parse import parse
from ferrite.ir.program import Program, Scalar
from ferrite.native import NativeCode
from ferrite.pipeline import PassRecord
from ferrite.runtime.cache import Artifact, Built, Uncacheable
from ferrite.runtime.held import found_objects, kept_objects
from ferrite.runtime.native import bytecode_of
from ferrite.schedule.order import NotFused
from ferrite.schedule.steps import Together

WORD = re.compile(r"\w+")
BYTECODE = "bytecode"  # a section; kernels have other names


@dataclass(frozen=True)
class Compiled:
    """What the stages make of a graph. `objects`: what the code names beside its inputs."""

    code: NativeCode
    objects: Mapping[str, Any]
    record: GraphRecord


def as_entry(compiled: Compiled, index: Index) -> Built:
    """`index`: of the graph as it was captured."""
    code = compiled.code
    metadata = {
        "source": source_data(code.source, index),
        "kernels": code.kernels,
        "arguments": arguments_of_kernels(code),
        "record": record_data(compiled.record, index),
    }
    objects = named_objects(compiled)
    try:
        metadata["objects"], constants = kept_objects(objects, index)
    except Uncacheable as reason:
        return Built(code.code, metadata, str(reason))
    return Built({**code.code, BYTECODE: bytecode_of(code.source, objects), **constants}, metadata)


def arguments_of_kernels(code: NativeCode) -> list[int | None]:
    """How many arguments each kernel has that is called; kernels do not say so themselves."""
    counts = {call.kernel: len(call.arguments) for run in code.source.runs for call in run.calls}
    return [counts.get(number) for number in range(len(code.kernels))]


def named_objects(compiled: Compiled) -> dict[str, Any]:
    """The objects that the code does name: lowering knows of more."""
    source = compiled.code.source
    words = {word for text in (source.text, *map(str, source.programs)) for word in WORD.findall(text)}
    return {name: value for name, value in compiled.objects.items() if name in words}


def from_entry(artifact: Artifact, places: Places, objects: Mapping[str, Any] | None, kind: str) -> Compiled:
    """`places`: of the graph as it was captured. `objects`: where they are known, and need not be found there."""
    data, sections = artifact.metadata, artifact.sections
    source = source_from(data["source"], places, sections.get(BYTECODE, b""))
    kernels = tuple((name, tuple(complaints)) for name, complaints in data["kernels"])
    names = [name for name in sections if name != BYTECODE and not name.startswith("object ")]
    code = NativeCode(source, kernels, {name: sections[name] for name in names})
    held = found_objects(data["objects"], sections, places) if objects is None else objects
    return Compiled(code, held, record_from(data["record"], places, kind, source.commented))


# --- the host program -------------------------------------------------------------------------------------------------


def source_data(source: NativeSource, index: Index) -> dict[str, Any]:
    numbers = ((row, index.place_of_line(line)) for row, line in source.lines.items())
    return {
        "function": source.function,
        "text": source.text,
        "lines": [(row, number) for row, number in numbers if number is not None],
        "operators": source.operators,
        "runs": list(map(run_data, source.runs)),
        "programs": list(map(str, source.programs)),
        "scalars": [str(scalar_program(value, symbols)) for value, symbols in source.scalars],
    }


def source_from(data: Mapping[str, Any], places: Places, bytecode: bytes) -> NativeSource:
    return NativeSource(
        data["function"],
        data["text"],
        {row: line for row, number in data["lines"] if (line := places.line(number)) is not None},
        dict(data["operators"]),
        [run_from(*each) for each in data["runs"]],
        list(map(parse, data["programs"])),
        list(map(scalar_from, data["scalars"])),
        bytecode,
    )


def run_data(run: RunTable) -> tuple[Any, ...]:
    together = [(each.first, each.count, each.threads) for each in run.together]
    return run.arena, run.slots, [(call.kernel, call.arguments, call.complaints) for call in run.calls], together


def run_from(arena: int, slots: int, calls: Sequence[Any], together: Sequence[Any]) -> RunTable:
    return RunTable(arena, slots, tuple(map(kernel_call, calls)), tuple(Together(*each) for each in together))


def kernel_call(data: Sequence[Any]) -> KernelCall:
    kernel, arguments, complaints = data
    return KernelCall(kernel, tuple((slot, offset) for slot, offset in arguments), tuple(complaints))


def scalar_program(value: Expr, symbols: tuple[Symbol, ...]) -> Program:
    """A number over symbols as a program that returns it: programs have a text."""
    return Program("scalar", symbols, (), (), (Scalar(value),))


def scalar_from(text: str) -> tuple[Expr, tuple[Symbol, ...]]:
    program = parse(text)
    (output,) = program.outputs
    assert isinstance(output, Scalar)
    return output.value, tuple(item for item in program.inputs if isinstance(item, Symbol))


# --- the record -------------------------------------------------------------------------------------------------------


def record_data(record: GraphRecord, index: Index) -> dict[str, Any]:
    def numbers(lines: Iterable[ModelLine | None]) -> list[int | None]:
        return [index.place_of_line(line) for line in lines]

    return {
        "operators": record.operators,
        "inputs": record.inputs,
        "kernels": [(each.name, each.operators, numbers(each.lines), each.region) for each in record.kernels],
        "eager": [(each.operator, each.reason, *numbers([each.line])) for each in record.eager_calls],
        "memory": None if record.memory is None else (record.memory.peak, record.memory.eager),
        "not fused": [(each.nodes, each.group, each.reason) for each in record.not_fused],
        "passes": [
            (each.name, dict(each.rewrites), each.nodes_before, each.nodes_after, each.note, dict(each.facts))
            for each in record.passes
        ],
    }


def record_from(data: Mapping[str, Any], places: Places, kind: str, source: str) -> GraphRecord:
    def lines(numbers: Iterable[int | None]) -> tuple[ModelLine | None, ...]:
        return tuple(None if number is None else places.line(number) for number in numbers)

    def some(numbers: Iterable[int | None]) -> tuple[ModelLine, ...]:
        return tuple(line for line in lines(numbers) if line is not None)

    return GraphRecord(
        kind=kind,
        line=places.first_line(),
        operators=data["operators"],
        inputs=tuple(data["inputs"]),
        source=source,
        kernels=tuple(Kernel(name, tuple(nodes), some(at), region) for name, nodes, at, region in data["kernels"]),
        eager_calls=tuple(EagerCall(operator, reason, *lines([at])) for operator, reason, at in data["eager"]),
        passes=tuple(PassRecord(name, 0.0, *rest) for name, *rest in data["passes"]),
        not_fused=tuple(NotFused(tuple(nodes), tuple(group), reason) for nodes, group, reason in data["not fused"]),
        memory=None if data["memory"] is None else Memory(*data["memory"]),
    )


def with_passes(compiled: Compiled, before: tuple[PassRecord, ...]) -> Compiled:
    """The same with what was done to the graph earlier in the record."""
    return replace(compiled, record=replace(compiled.record, passes=(*before, *compiled.record.passes)))
