"""Children that are asked: they take a task each, tell of every call, and may crash or hang.

A child says `begins` and `compiles` before a call runs in eager and compiled, `together` before several do; the last
word of one that dies or is silent tells who did it. What dies among others is asked again alone.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import select
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.funcname_cache import get_funcname
from torch.testing._internal import common_methods_invocations

from bench.operators.order import Part, Task, calls_of
from tests.tables import entries as tables
from tests.tables.entries import Entry, Sample, entries
from tests.tables.judge import judge, ours, quiet
from tests.tables.together import AT_ONCE, judge_together

TASKS_EACH = 40  # of a child, whose memory grows
Record = dict[str, Any]


@dataclass
class Asked:
    """A task. `apart`: keys that are compiled alone."""

    task: Task
    apart: set[str] = field(default_factory=set)


@dataclass
class Child:
    pid: int
    questions: int
    answers: int
    rest: bytes = b""
    asked: Asked | None = None
    begun: list[str] = field(default_factory=list)
    is_eager: bool = False
    heard: float = 0.0
    taken: int = 0


# --- in the child -----------------------------------------------------------------------------------------------------


def work(limit: int, questions: int, answers: int) -> None:
    def tell(**what: Any) -> None:
        os.write(answers, (json.dumps(what) + "\n").encode())

    quiet()
    with os.fdopen(questions) as lines:
        for line in lines:
            question = json.loads(line)
            task = Task(question["way"], tuple(Part(*each) for each in question["parts"]))
            answer(task, limit, set(question["done"]), set(question["apart"]), tell)
            tell(finished=True)


def answer(task: Task, limit: int, done: set[str], apart: set[str], tell: Callable[..., None]) -> None:
    """Tell that calls begin, and their verdicts."""
    calls: dict[str, tuple[Entry, Sample, str]] = {}
    for part in task.parts:
        try:
            found = {key: (entries()[part.name], sample, part.layout) for key, sample in calls_of(part, limit)}
            calls |= {key: call for key, call in found.items() if key not in done}
        except Exception as problem:  # torch's own samples fail for some types
            if f"{part.key}|-" not in done:
                tell(key=f"{part.key}|-", kind="foreign", why=f"no samples: {problem}"[:200])
    together = [key for key in calls if task.way in AT_ONCE and not {key, name_of(key)} & apart]
    for start in range(0, len(together), AT_ONCE.get(task.way, 1)):
        some = together[start : start + AT_ONCE[task.way]]
        if len(some) == 1:
            continue
        tell(together=some)
        begin = time.perf_counter()
        verdicts = judge_together([calls[key] for key in some], task.way)
        seconds = round((time.perf_counter() - begin) / len(some), 2)
        for key, verdict in zip(some, verdicts, strict=True):
            if verdict is not None:
                del calls[key]
                tell(key=key, kind=verdict.kind, why=verdict.why, seconds=seconds)
    for key, (entry, sample, layout) in calls.items():
        tell(begins=key)
        begin = time.perf_counter()
        verdict = judge(entry, sample, layout, task.way, lambda key=key: tell(compiles=key))
        tell(key=key, kind=verdict.kind, why=verdict.why[:300], seconds=round(time.perf_counter() - begin, 2))


def name_of(key: str) -> str:
    return key.split("|")[0]


def mute() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


# --- in the parent ----------------------------------------------------------------------------------------------------


class Sweep:
    """Verdicts of tasks in their order, from so many children at once.

    `patience`: seconds without a word until a child is taken for hanging. After `seconds` no task begins.
    """

    def __init__(
        self, tasks: Sequence[Task], known: set[str], *, workers: int, limit: int, patience: float, seconds: float
    ) -> None:
        self.waiting = deque(Asked(task) for task in tasks)
        self.workers, self.limit, self.patience = workers, limit, patience
        self.end = time.monotonic() + seconds
        self.children: dict[int, Child] = {}  # by the pipe of their answers
        self.done: dict[str, list[str]] = defaultdict(list)  # keys by their part
        for key in known:
            self.note(key)
        # What no graph holds makes all others of its task compile anew. Eager runs of higher order operators compile.
        self.odd = {name for name in entries() if name.startswith("hop:")}

    def verdicts(self) -> Iterator[Record]:
        warm_up()
        try:
            while self.is_waiting() or self.children:
                while self.is_waiting() and len(self.children) < self.workers:
                    self.ask(self.fork())
                yield from self.heard(1.0)
        finally:
            for child in self.children.values():
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)

    def note(self, key: str) -> None:
        self.done[key.rsplit("|", 1)[0]].append(key)

    def is_waiting(self) -> bool:
        return bool(self.waiting) and time.monotonic() < self.end

    def fork(self) -> Child:
        (theirs, questions), (answers, writing) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for other in self.children.values():  # or their questions would never end
                    os.close(other.questions)
                    os.close(other.answers)
                os.close(questions)
                os.close(answers)
                mute()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                work(self.limit, theirs, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        os.close(writing)
        child = self.children[answers] = Child(pid, questions, answers)
        return child

    def ask(self, child: Child) -> None:
        """The next task; a child without one ends."""
        child.asked, child.begun, child.heard = None, [], time.monotonic()
        if not self.is_waiting() or child.taken >= TASKS_EACH:
            os.close(child.questions)
            return
        asked = child.asked = self.waiting.popleft()
        child.taken += 1
        parts = asked.task.parts
        done = [key for part in parts for key in self.done[part.key]]
        apart = [*asked.apart, *self.odd.intersection(part.name for part in parts)]
        question = {"parts": parts, "way": asked.task.way, "done": done, "apart": apart}
        os.write(child.questions, (json.dumps(question) + "\n").encode())

    def heard(self, wait: float) -> Iterator[Record]:
        ready, _, _ = select.select(list(self.children), [], [], wait)
        for pipe in ready:
            child = self.children[pipe]
            child.heard = time.monotonic()
            more = os.read(pipe, 1 << 16)
            if not more:
                yield from self.ended(child, "crashed")
                continue
            *lines, child.rest = (child.rest + more).split(b"\n")
            for record in map(json.loads, lines):
                yield from self.told(child, record)
        for child in list(self.children.values()):
            if child.asked is not None and time.monotonic() - child.heard > self.patience:
                os.kill(child.pid, signal.SIGKILL)
                yield from self.ended(child, "hung")

    def told(self, child: Child, record: Record) -> Iterator[Record]:
        child.is_eager = "begins" in record
        child.begun = record.get("together", [record[word] for word in ("begins", "compiles") if word in record])
        if "finished" in record:
            self.ask(child)
        if "key" in record:
            self.note(record["key"])
            if record["kind"] == "uncompiled":
                self.odd.add(name_of(record["key"]))
            yield record

    def ended(self, child: Child, how: str) -> Iterator[Record]:
        del self.children[child.answers]
        os.close(child.answers)
        _, status = os.waitpid(child.pid, 0)
        asked = child.asked
        if asked is None:
            return
        os.close(child.questions)
        why = f"exit status {os.waitstatus_to_exitcode(status)}" if how == "crashed" else f"{self.patience:g} s"
        if len(child.begun) > 1:
            asked.apart.update(child.begun)
            self.waiting.appendleft(asked)
        elif child.begun:
            (key,) = child.begun
            self.note(key)
            self.waiting.appendleft(asked)
            if child.is_eager:
                yield {"key": key, "kind": "foreign", "why": f"eager itself: {how}, {why}"}
            else:
                yield {"key": key, "kind": how, "why": why}
        elif len(asked.task.parts) > 1:  # between calls: who did it shows alone
            self.waiting.extendleft(Asked(Task(asked.task.way, (part,))) for part in asked.task.parts)
        else:
            yield {"key": f"{asked.task.parts[0].key}|-", "kind": how, "why": f"between calls: {why}"}


def warm_up() -> None:
    """Everything that compiling loads is loaded before the first fork: a child takes seconds otherwise."""
    quiet()
    x = torch.ones(8, requires_grad=True)
    for dynamic in (False, True):
        ours(dynamic)(lambda x: x.sin().sum())(x).backward()
    torch.compiler.reset()
    # Dynamo reads whole files for the names of functions in its logs.
    for module in (common_methods_invocations, torch.nn.functional, torch.functional, torch._tensor, tables):
        get_funcname(inspect.getfile(module), 1)
    gc.collect()
    gc.freeze()
