"""A report as plain data: what its JSON holds, and the page shows. `VERSION` counts changes of this file's classes.

Text is lines, with the nodes of the graph that each comes from: `sets` has every set of nodes once, `marks` the number
of one for each line. A node is a number: its place in the last graph of its direction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

FORMAT = "ferrite report"
VERSION = 1


@dataclass(frozen=True)
class SourceFile:
    """Lines of a file of the model's, the first of which has this number; `used`: those that graphs come from."""

    path: str
    first: int
    lines: tuple[str, ...]
    used: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A line of the model: the number of its file, -1 where that could not be read, its number, and its text."""

    file: int
    line: int
    text: str


@dataclass(frozen=True)
class Text:
    title: str
    lines: tuple[str, ...]
    marks: tuple[int, ...]


@dataclass(frozen=True)
class Hunk:
    """From one graph to the next: behind so many rows, so many go and these come."""

    at: int
    removed: int
    added: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """`hunks`: what it changed, in rows of its graph; None where graphs were not kept."""

    stage: str
    name: str
    seconds: float
    rewrites: dict[str, int]
    nodes_before: int
    nodes_after: int
    note: str
    facts: dict[str, int]
    hunks: tuple[Hunk, ...] | None = None


@dataclass(frozen=True)
class NearMiss:
    """A rule that had candidates and did not fire there, by the reason; `nodes`: names of the first of so many."""

    rule: str
    reason: str
    count: int
    nodes: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """`text` is the kernel IR, `code` what was generated; both are numbers of texts, -1 where there is none."""

    name: str
    device: str
    language: str
    text: int
    code: int
    launches: int
    digest: str


@dataclass(frozen=True)
class Step:
    """What runs, in order: a launch of a kernel, or a call of torch's. `runs`: the number of the native call that it is
    part of, -1 for none. `reads`: steps whose results it uses. `seconds`: None where it was not measured."""

    kind: str
    title: str
    kernel: int
    run: int
    region: int | None
    nodes: tuple[int, ...]
    places: tuple[int, ...]
    reason: str
    reads: tuple[int, ...]
    bytes: int | None
    flops: int | None
    seconds: float | None = None
    calls: int = 0


@dataclass(frozen=True)
class Held:
    """Memory from one step to another, both included. `within`: what it lies inside of, where it takes no memory by
    itself."""

    name: str
    what: str
    bytes: int
    first: int
    last: int
    place: int
    within: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes at every launch and call of the plan, and at last when all is done; `steps`: what each does."""

    peak: int | None
    eager: int | None
    by_step: tuple[int, ...] = ()
    steps: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class NotFused:
    nodes: tuple[str, ...]
    group: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Collective:
    """A collective from the step that starts it to the one that waits for it."""

    title: str
    first: int
    last: int
    bytes: int | None
    places: tuple[int, ...]


@dataclass(frozen=True)
class EagerCall:
    operator: str
    reason: str
    place: int


@dataclass(frozen=True)
class Node:
    """One of the last graph. `row`: the number of its line."""

    name: str
    row: int
    place: int


@dataclass(frozen=True)
class Graph:
    """`kind`: "torch", "joint", or a direction. `rows`: every line that its graphs have; `first`: the graph as it came.
    `detailed`: whether a report was asked for when it was compiled."""

    kind: str
    title: str
    place: int
    detailed: bool
    operators: int = 0
    failure: str | None = None
    rows: tuple[str, ...] = ()
    first: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    nodes: tuple[Node, ...] = ()
    sets: tuple[tuple[int, ...], ...] = ()
    texts: tuple[Text, ...] = ()
    program: int = -1
    host: int = -1
    kernels: tuple[Kernel, ...] = ()
    steps: tuple[Step, ...] = ()
    eager_calls: tuple[EagerCall, ...] = ()
    not_fused: tuple[NotFused, ...] = ()
    not_recorded: tuple[str, ...] = ()
    memory: Memory | None = None
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Difference:
    name: str
    there: str | None
    here: str | None


@dataclass(frozen=True)
class CacheQuestion:
    what: str
    result: str
    reason: str
    entry: str
    seconds: float
    nearest: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class SavedValue:
    how: str
    operator: str
    about: str
    bytes: int
    place: int


@dataclass(frozen=True)
class Tuned:
    """A matrix product that was measured: microseconds of torch's call and of a kernel of ours."""

    problem: str
    torch: float
    ours: float
    configuration: str


@dataclass(frozen=True)
class Compile:
    """One call of the compiler."""

    title: str
    place: int
    number: str
    recompiled: str | None
    guards: tuple[str, ...]
    options: dict[str, Any]
    stages: dict[str, float]
    graphs: tuple[Graph, ...]
    cache: tuple[CacheQuestion, ...]
    saved: tuple[SavedValue, ...]
    tuning: tuple[Tuned, ...]


@dataclass(frozen=True)
class GraphBreak:
    reason: str
    place: int
    function: str


@dataclass(frozen=True)
class Limits:
    """What a device can do, as measured for this report: bytes and floating-point operations a second."""

    device: str
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Report:
    format: str
    version: int
    made: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]
    files: tuple[SourceFile, ...]
    places: tuple[Place, ...]
    compiles: tuple[Compile, ...]
    breaks: tuple[GraphBreak, ...]
    limits: tuple[Limits, ...] = ()
    notes: tuple[str, ...] = ()


def as_json(value: Any) -> Any:
    """A report as lists, mappings and what JSON has besides."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return value if value and isinstance(value[0], (int, str)) else list(map(as_json, value))
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return value
