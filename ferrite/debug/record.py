"""The record of what was compiled: graphs, time per stage, kernels, and what runs in eager and why.

`ferrite.last_compile()` gives the newest record. A backward graph is compiled when it is first needed, and then joins
the record of its forward graph. A record holds text and numbers only, never a tensor.
"""

from __future__ import annotations

import collections
import itertools
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ferrite.cache import Outcome
from ferrite.capture import torch_dynamo
from ferrite.debug.communication import Communication
from ferrite.debug.details import GraphDetails
from ferrite.errors import FerriteError, Refusal, layout
from ferrite.graph import ModelLine
from ferrite.options import STAGES, Options
from ferrite.passes import CommunicationRecord
from ferrite.pipeline import PassRecord
from ferrite.runtime import CollectiveTimes, MeasuredRun
from ferrite.runtime.cuda import Recordings
from ferrite.schedule import FusionRefusal
from ferrite.tune import Found, Problem

MAX_RECORDS = 64  # records remembered


@dataclass(frozen=True)
class EagerCall:
    """An operator that runs in eager, and why."""

    operator: str
    refusal: Refusal

    @property
    def reason(self) -> str:
        return self.refusal.reason

    @property
    def line(self) -> ModelLine | None:
        return self.refusal.line


@dataclass(frozen=True)
class KernelRecord:
    """A compiled kernel: the operators it covers and the lines of the model they came from. Kernels of a graph with the
    same `region` run side by side, each on one thread."""

    name: str
    operators: tuple[str, ...]
    lines: tuple[ModelLine, ...]
    region: int | None = None


def kernel_names(kernels: Sequence[KernelRecord]) -> list[tuple[str, str]]:
    """Of every launch, with the first line of the model that it came from."""
    return [(kernel.name, str(kernel.lines[0]) if kernel.lines else "") for kernel in kernels]


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes held at once beyond the inputs, at the sizes seen: by the plan, and by eager, which frees what an
    operator gives after its last use. None where sizes are known only when it runs."""

    peak: int | None
    eager: int | None


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph. `source` is the text of its host program, empty if the graph runs in eager whole. What is
    read from the cache gets its kind, line and source from those who read it. `not_recorded`: where CUDA graphs were
    asked for, why a step is in none."""

    kind: str = field(metadata={"read as": ""})
    line: ModelLine | None = field(metadata={"read as": None})
    operators: int
    inputs: tuple[str, ...]
    source: str = field(metadata={"read as": ""})
    kernels: tuple[KernelRecord, ...]
    eager_calls: tuple[EagerCall, ...]
    passes: tuple[PassRecord, ...] = ()
    failure: str | None = None
    not_fused: tuple[FusionRefusal, ...] = ()
    memory: PeakMemory | None = None
    not_recorded: tuple[Refusal, ...] = ()
    communication: CommunicationRecord | None = None  # where it has collectives


@dataclass(frozen=True)
class SavedValue:
    """A value that the backward graph needs: what computes it, what it looks like, and its bytes at the sizes seen."""

    operator: str
    about: str
    bytes: int
    line: ModelLine | None


@dataclass(frozen=True)
class SavedForBackward:
    """What the partitioner chose: what the forward graph keeps for the backward graph, and what that computes again.

    `recomputed` leaves out views, which cost nothing. `inputs`: how many of the kept values are inputs, or views of
    them: these are there anyway.
    """

    kept: tuple[SavedValue, ...]
    recomputed: tuple[SavedValue, ...]
    inputs: int

    @property
    def values(self) -> int:
        return len(self.kept) + self.inputs

    @property
    def bytes(self) -> int:
        """Kept beyond the inputs."""
        return sum(value.bytes for value in self.kept)

    @property
    def recomputed_bytes(self) -> int:
        """What keeping the recomputed values would cost."""
        return sum(value.bytes for value in self.recomputed)


@dataclass(eq=False)
class CompileRecord:
    """What one call of the compiler did."""

    options: Options
    line: ModelLine | None = None
    number: int = 0  # of all that this process has captured
    has_unknown_sizes: bool = False  # asked for with `dynamic`, or met with other ones before
    graphs: list[GraphRecord] = field(default_factory=list)
    saved: SavedForBackward | None = None
    passes: dict[str, tuple[PassRecord, ...]] = field(default_factory=dict)  # of stages before the graphs part
    captured: Outcome | None = None  # whether the cache had what passes make of the graph of torch calls
    joint: Outcome | None = None  # and of that of forward and backward
    cache: list[Outcome] = field(default_factory=list)  # one for each time it was asked for a compiled graph
    recordings: list[Recordings] = field(default_factory=list)  # of each part that CUDA graphs are made of
    collective_times: list[tuple[CommunicationRecord, CollectiveTimes]] = field(
        default_factory=list, repr=False
    )  # as it runs
    details: list[GraphDetails] = field(default_factory=list, repr=False)  # for a report: empty if none is asked for
    capture: torch_dynamo.AboutCapture | None = None  # for a report, as `details`
    tuning: dict[Problem, Found] = field(default_factory=dict)  # for a report: times that decided something
    dumps: list[str] = field(default_factory=list)  # folders that stages were written to
    _seconds: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _open: list[list[float]] = field(default_factory=list, repr=False)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per stage over all graphs, in the order of the stages."""
        return {name: self._seconds[name] for name in STAGES if name in self._seconds}

    @property
    def asked(self) -> tuple[Outcome, ...]:
        """Every question to the cache, in order."""
        before = (each for each in (self.captured, self.joint) if each is not None)
        return (*before, *self.cache)

    @property
    def rewrites(self) -> dict[str, int]:
        """How often each rule fired, over all stages and graphs."""
        total: collections.Counter[str] = collections.Counter()
        for steps in (*self.passes.values(), *(graph.passes for graph in self.graphs)):
            for step in steps:
                total.update(step.rewrites)
        return dict(total)

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    @property
    def to_repeat(self) -> str:
        """How to do the same again: versions, machine, threads, options; each graph from its dump, if there is one."""
        from ferrite.debug.dump import about_run

        facts = about_run(self.options)
        settings = facts["options"]
        rows = [
            ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
            f"{facts['machine']}, {facts['threads']} threads",
            f'torch.compile(..., backend="ferrite", options={settings!r})' if settings else "no options",
            *(["with sizes that may vary: dynamic=True"] if self.has_unknown_sizes else []),
            *(f"python -m ferrite replay {shlex.quote(folder)}" for folder in self.dumps),
        ]
        return "\n".join(rows if self.dumps else [*rows, "FERRITE_DUMP=dir keeps what every stage was given"])

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """Why work of a GPU is in no CUDA graph, where these were asked for: steps, then calls, each reason once."""
        reasons = [str(refusal) for graph in self.graphs for refusal in graph.not_recorded]
        return tuple(dict.fromkeys([*reasons, *(note for each in self.recordings for note in each.notes)]))

    @property
    def communication(self) -> Communication:
        """The collectives of all graphs, with what they should cost, and did; prints as a table."""
        graphs = [(graph.kind, graph.communication) for graph in self.graphs if graph.communication is not None]
        runs = [self.last_run(each) for _, each in graphs]
        return Communication(tuple(graphs), tuple(runs))

    def last_run(self, communication: CommunicationRecord) -> MeasuredRun | None:
        """When the collectives of a graph began and were over, as far as it has run."""
        return next((times.run() for about, times in self.collective_times if about is communication), None)

    @property
    def eager_calls(self) -> tuple[EagerCall, ...]:
        return tuple(call for graph in self.graphs for call in graph.eager_calls)

    def why_not_fused(self, first: str, second: str) -> str:
        """Why two operators, by the names of their nodes, are in different kernels; or that they are in one."""
        for graph in self.graphs:
            for kernel in graph.kernels:
                if first in kernel.operators and second in kernel.operators:
                    return f"{first} and {second} are in one kernel, {kernel.name}"
        if found := next(self.refusals_between({first}, {second}), None):
            return f"{first} and {second} are in different kernels: {found[2]}"
        if found := next(self.refusals_between(self.in_one_kernel(first), self.in_one_kernel(second)), None):
            one, other, reason = found
            return f"{first} and {second} are in different kernels, with {one} and {other}: {reason}"
        known = {node for graph in self.graphs for kernel in graph.kernels for node in kernel.operators}
        missing = [name for name in (first, second) if name not in known]
        if missing:
            have = f"Kernels have: {', '.join(sorted(known)) or 'nothing'}"
            others = "Other operators are computed where they are read, are torch's, or were rewritten"
            return f"{' and '.join(missing)}: in no kernel. {have}. {others}"
        return f"{first} and {second} were never held against each other: they share no memory, or something between"

    def in_one_kernel(self, name: str) -> set[str]:
        return {other for kernel in self.kernels if name in kernel.operators for other in kernel.operators}

    def refusals_between(self, ones: set[str], others: set[str]) -> Iterator[tuple[str, str, str]]:
        """Where one of some operators was refused beside one of the others: both, and why."""
        for each in (refusal for graph in self.graphs for refusal in graph.not_fused):
            for nodes, group in ((each.nodes, each.group), (each.group, each.nodes)):
                pairs = [(one, other) for one in nodes if one in ones for other in group if other in others]
                yield from ((one, other, each.refusal.reason) for one, other in pairs[:1])

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Count the time spent inside to a stage, less what stages inside it count."""
        start = time.perf_counter()
        inner = [0.0]
        self._open.append(inner)
        try:
            yield
        finally:
            self._open.pop()
            elapsed = time.perf_counter() - start
            if self._open:
                self._open[-1][0] += elapsed
            self._seconds[stage] += elapsed - inner[0]

    def add(self, graph: GraphRecord) -> None:
        with self._lock:
            self.graphs.append(graph)

    def __str__(self) -> str:
        from ferrite.debug.record_table import render

        return render(self)


_numbers = itertools.count()
_records: collections.deque[CompileRecord] = collections.deque(maxlen=MAX_RECORDS)


def start_record(options: Options, line: ModelLine | None, has_unknown_sizes: bool = False) -> CompileRecord:
    record = CompileRecord(options, line, next(_numbers), has_unknown_sizes)
    _records.append(record)
    return record


def forget_record(record: CompileRecord) -> None:
    """Of a call that came to nothing."""
    if record in _records:
        _records.remove(record)


def last_compile() -> CompileRecord:
    """The record of the newest compilation in this process."""
    if not _records:
        raise FerriteError(
            layout(
                "nothing has been compiled yet",
                {"to change that": 'call a function made by torch.compile(..., backend="ferrite") first'},
            )
        )
    return _records[-1]


def forget_compiles() -> None:
    """As in a process that has compiled nothing yet."""
    global _numbers
    _numbers = itertools.count()
    _records.clear()


def recent_compiles() -> list[CompileRecord]:
    """The records of the last compilations, oldest first: a function with graph breaks makes one per graph."""
    return list(_records)
