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

from collections.abc import Mapping, Sequence
from typing import Any

from ferrite.cache.constant_storage import found_objects, kept_objects
from ferrite.cache.entry import Artifact
from ferrite.cache.laws import check_graph
from ferrite.cache.lookup import Built
from ferrite.codegen import Executable, HostSource, KernelCall, RunTable
from ferrite.errors import NotCached, Refusal
from ferrite.graph import Index, Places
from ferrite.ir import Expr
from ferrite.ir.index import Symbol
from ferrite.ir.program import Program, Scalar, parse
from ferrite.schedule import ParallelRegion

BYTECODE = "bytecode"  # a section; kernels have other names


def as_entry(
    executable: Executable,
    objects: Mapping[str, Any],
    record: Mapping[str, Any],
    index: Index,
    refusal: Refusal | None = None,
    note: str = "",
) -> Built:
    """`objects`: what the code names beside its inputs. `record`: what is to be known of it, as plain data. `index`: of
    the graph as it was captured. `refusal`: why it is not to be kept, if it is not."""
    source = executable.source
    metadata: dict[str, Any] = {
        "source": source_data(source, index),
        "kernels": executable.kernels,
        "arguments": arguments_of_kernels(executable),
        "record": record,
    }
    try:
        metadata["objects"], constants = kept_objects(objects, index)
    except NotCached as refused:
        return Built(executable.code, metadata, refused.refusal)
    return Built({**executable.code, BYTECODE: source.bytecode, **constants}, metadata, refusal, note)


def arguments_of_kernels(executable: Executable) -> list[int | None]:
    """How many arguments each kernel has that is called; kernels do not say so themselves."""
    counts = {call.kernel: len(call.arguments) for run in executable.source.runs for call in run.calls}
    return [counts.get(number) for number in range(len(executable.kernels))]


def from_entry(artifact: Artifact, places: Places) -> tuple[Executable, dict[str, Any], Mapping[str, Any]]:
    """What was kept: code, objects, record. `places`: of the graph as it was captured. An entry that breaks a law of
    `ferrite.cache.laws` raises."""
    data, sections = artifact.metadata, artifact.sections
    check_graph(data, sections, len(places.nodes))
    source = source_from(data["source"], places, sections.get(BYTECODE, b""))
    kernels = tuple((name, tuple(complaints)) for name, complaints in data["kernels"])
    names = [name for name in sections if name != BYTECODE and not name.startswith("object ")]
    executable = Executable(source, kernels, {name: sections[name] for name in names})
    return executable, found_objects(data["objects"], sections, places), data["record"]


# --- the host program -------------------------------------------------------------------------------------------------


def source_data(source: HostSource, index: Index) -> dict[str, Any]:
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


def source_from(data: Mapping[str, Any], places: Places, bytecode: bytes) -> HostSource:
    return HostSource(
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
    parallel_regions = [(each.first, each.count, each.threads) for each in run.parallel_regions]
    return (
        run.arena,
        run.slots,
        [(call.kernel, call.arguments, call.complaints) for call in run.calls],
        parallel_regions,
        run.device,
    )


def run_from(arena: int, slots: int, calls: Sequence[Any], parallel_regions: Sequence[Any], device: str) -> RunTable:
    return RunTable(
        arena, slots, tuple(map(kernel_call, calls)), tuple(ParallelRegion(*each) for each in parallel_regions), device
    )


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
