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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrite.cache.codec import NumberOverSymbols, decode, encode
from ferrite.cache.constant_storage import KeptObject, found_objects, kept_objects
from ferrite.cache.entry import Artifact
from ferrite.cache.laws import check_graph
from ferrite.cache.lookup import NewEntry
from ferrite.codegen import Executable, HostSource, RecordedPart, RunTable
from ferrite.errors import ModelLine, NotCached, Refusal
from ferrite.graph import PlaceIndex, Places
from ferrite.ir.program import Program

BYTECODE = "bytecode"  # a section; kernels have other names


@dataclass(frozen=True)
class GraphEntry:
    """What is kept of an executable beside its sections. `arguments`: how many each kernel has that is called; kernels
    do not say so themselves."""

    function: str
    text: str
    lines: Mapping[int, ModelLine]
    operators: Mapping[str, str]
    runs: tuple[RunTable, ...]
    programs: tuple[Program, ...]
    scalars: tuple[NumberOverSymbols, ...]
    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    arguments: tuple[int | None, ...]
    objects: Mapping[str, KeptObject]
    parts: tuple[RecordedPart, ...]
    not_recorded: tuple[Refusal, ...]


def as_entry(
    executable: Executable,
    objects: Mapping[str, Any],
    record: Any,
    index: PlaceIndex,
    refusal: Refusal | None = None,
    note: str = "",
) -> NewEntry:
    """`objects`: what the code names beside its inputs. `record`: what is to be known of it, as plain data. `index`: of
    the graph as it was captured. `refusal`: why it is not to be kept, if it is not."""
    source = executable.source
    try:
        kept, constants = kept_objects(objects, index)
    except NotCached as refused:
        return NewEntry(executable.code, {}, refused.refusal)
    entry = GraphEntry(
        source.function,
        source.text,
        source.lines,
        source.operators,
        tuple(source.runs),
        tuple(source.programs),
        tuple(source.scalars),
        executable.kernels,
        arguments_of_kernels(executable),
        kept,
        tuple(source.parts),
        source.not_recorded,
    )
    sections = {**executable.code, BYTECODE: source.bytecode, **constants}
    return NewEntry(sections, {"graph": encode(GraphEntry, entry, index), "record": record}, refusal, note)


def arguments_of_kernels(executable: Executable) -> tuple[int | None, ...]:
    counts = {call.kernel: len(call.arguments) for run in executable.source.runs for call in run.calls}
    return tuple(counts.get(number) for number in range(len(executable.kernels)))


def from_entry(artifact: Artifact, places: Places) -> tuple[Executable, dict[str, Any], Any]:
    """What was kept: code, objects, record. `places`: of the graph as it was captured. An entry that breaks a law of
    `ferrite.cache.laws` raises."""
    sections = artifact.sections
    entry = decode(GraphEntry, artifact.metadata["graph"], places)
    check_graph(entry, sections, len(places.nodes))
    source = HostSource(
        entry.function,
        entry.text,
        dict(entry.lines),
        dict(entry.operators),
        list(entry.runs),
        list(entry.programs),
        list(entry.scalars),
        sections.get(BYTECODE, b""),
        parts=list(entry.parts),
        not_recorded=entry.not_recorded,
    )
    names = [name for name in sections if name != BYTECODE and not name.startswith("object ")]
    executable = Executable(source, entry.kernels, {name: sections[name] for name in names})
    return executable, found_objects(entry.objects, sections, places), artifact.metadata["record"]
