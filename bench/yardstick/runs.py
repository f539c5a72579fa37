"""The parent's side: all tests of a file with one backend, in as many child processes as it takes.

A child runs test after test. When it dies, the test it was in is `crashed`; when a test takes longer than the limit,
the child is killed and the test is `hung`; a new child goes on with the next one. What is known lies in a file of
JSON lines, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "crashed", "hung", "skipped")
START = 300.0  # seconds in which a child must have imported the file
GRACE = 2.0  # after the limit, in which the child writes where it hangs
POLL = 0.1


@dataclass(frozen=True)
class Result:
    """How a test went; `kind` and `reason` say why it failed, `graphs` how many graphs the backend was given."""

    test: str
    outcome: str
    kind: str = ""
    reason: str = ""
    graphs: int = 0
    by_inductor: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One file and one backend. Tests are left out with none of `only`, or one of `without`, in the name."""

    file: Path
    backend: str
    folder: Path
    replaced: Sequence[str] = ("inductor",)
    strict: bool = True
    placeholders: bool = False
    limit: float = 120.0
    per_child: int = 400
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    pytest_arguments: Sequence[str] = ()
    show: Callable[[str], None] = field(default=print, compare=False)

    def takes(self, test: str) -> bool:
        chosen = not self.only or any(part in test for part in self.only)
        return chosen and not any(part in test for part in self.without)

    @property
    def known(self) -> Path:
        """Where results are kept between runs."""
        return self.folder / f"{self.file.stem}.{self.backend}.jsonl"

    @property
    def output(self) -> Path:
        """What the last child wrote to the terminal."""
        return self.folder / f"{self.file.stem}.{self.backend}.txt"

    @property
    def listed(self) -> Path:
        return self.folder / f"{self.file.stem}.tests.json"


class NoTests(Exception):
    """The file could not be imported, or has no test."""


def results_of(plan: Plan, among: Collection[str] | None = None) -> list[Result]:
    """How every test of the file went, or those `among` them; what earlier runs found is included."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    wanted = [test for test in tests_of(plan) if plan.takes(test) and (among is None or test in among)]
    known = {test: result for test, result in read_known(plan).items() if test in set(wanted)}
    progress = Progress(plan, len(wanted), known)
    while left := [test for test in wanted if test not in known]:
        before = len(known)
        for result in run_child(plan, left[: plan.per_child]):
            known[result.test] = result
            with plan.known.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            progress.show()
        if len(known) == before:
            raise NoTests(f"{plan.file}: a child ended before its first test\n{ending(plan)}")
    progress.show(done=True)
    return [known[test] for test in wanted]


def read_known(plan: Plan) -> dict[str, Result]:
    if not plan.known.exists():
        return {}
    rows = [Result(**json.loads(line)) for line in plan.known.read_text(encoding="utf-8").splitlines()]
    return {row.test: row for row in rows}


def tests_of(plan: Plan) -> list[str]:
    """The names of all tests, in the file's order; they are the same for all backends."""
    if not plan.listed.exists():
        with Child(plan, None) as child:
            child.wait(START)
            tests = [event["test"] for event in child.events() if event["event"] == "collected"]
        if not tests:
            raise NoTests(f"{plan.file}: no test was found\n{ending(plan)}")
        plan.listed.write_text(json.dumps(tests))
    names: list[str] = json.loads(plan.listed.read_text())
    return names


class Progress:
    """A line every few seconds: how many tests of how many, and how they went."""

    EVERY = 10.0

    def __init__(self, plan: Plan, total: int, known: dict[str, Result]) -> None:
        self.plan, self.total, self.known = plan, total, known
        self.last = time.monotonic()

    def show(self, done: bool = False) -> None:
        if not done and time.monotonic() - self.last < self.EVERY:
            return
        self.last = time.monotonic()
        self.plan.show(f"{self.plan.file.name} {self.plan.backend}: {len(self.known)} of {self.total}, {self.counts()}")

    def counts(self) -> str:
        outcomes = [result.outcome for result in self.known.values()]
        return ", ".join(f"{outcomes.count(each)} {each}" for each in OUTCOMES if each in outcomes) or "none yet"


class Child:
    """A process of pytest, and what it has said so far."""

    def __init__(self, plan: Plan, tests: Sequence[str] | None) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="child-", dir=plan.folder))
        self.said = self.place / "events.jsonl"
        self.said.touch()
        self.stacks = self.place / "stacks.txt"
        task = {
            "file": str(plan.file.resolve()),
            "backend": plan.backend,
            "replaced": list(plan.replaced),
            "tests": None if tests is None else list(tests),
            "events": str(self.said),
            "stacks": str(self.stacks),
            "limit": plan.limit,
            "placeholders": plan.placeholders,
        }
        (self.place / "task.json").write_text(json.dumps(task))
        self.output = plan.output.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, *command_of(plan)],
            cwd=plan.file.resolve().parent,
            env=environment_of(plan, self.place),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what the tests start ends with it
        )

    def events(self) -> list[dict[str, Any]]:
        lines = self.said.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process and what it started, and remove what it wrote."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()
        shutil.rmtree(self.place, ignore_errors=True)


def command_of(plan: Plan) -> list[str]:
    common = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "bench.yardstick.plugin"]
    return [*common, *plan.pytest_arguments, str(plan.file.resolve())]


def environment_of(plan: Plan, place: Path) -> dict[str, str]:
    """Caches of its own, so that nothing is taken for compiled that is not."""
    found = {**os.environ, "YARDSTICK": str(place / "task.json"), "FERRITE_CACHE_DIR": str(place / "cache")}
    found["FERRITE_REPRO_DIR"] = str(place / "repro")
    found["FERRITE_STRICT"] = "1" if plan.strict else "0"
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def run_child(plan: Plan, tests: Sequence[str]) -> Iterator[Result]:
    """The results of one child, as they come; the last may be of the test that ended it."""
    with Child(plan, tests) as child:
        seen, current, since = 0, None, time.monotonic()
        while True:
            ended = child.process.poll() is not None  # before the events are read: none comes after
            events = child.events()
            for event in events[seen:]:
                since = time.monotonic()
                if event["event"] == "start":
                    current = event["test"]
                elif event["event"] == "end":
                    current = None
                    yield Result(**{name: value for name, value in event.items() if name != "event"})
                elif event["event"] == "finished":
                    return
            seen = len(events)
            if ended:
                if current is not None:
                    yield Result(current, "crashed", "crashed", how_it_ended(child.process.returncode, plan))
                return
            waited = time.monotonic() - since
            if current is not None and waited > plan.limit + GRACE:
                yield Result(current, "hung", "hung", where_it_hangs(child.stacks), seconds=round(waited, 1))
                return
            if current is None and waited > START:
                return
            time.sleep(POLL)


def how_it_ended(code: int, plan: Plan) -> str:
    """A signal or an exit status, and the last words of the process.

    >>> how_it_ended(-6, plan)  # doctest: +SKIP
    'SIGABRT; File "test_x.py", line 12 in test_abort'
    """
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"{name}; {ending(plan, 'File ')}".rstrip("; ")


def ending(plan: Plan, part: str = "") -> str:
    """What a child wrote last, or the first line of Python's stack that it wrote last."""
    lines = plan.output.read_text(encoding="utf-8", errors="replace").splitlines()
    if not part:
        return "\n".join(lines[-15:])
    fatal = max((i for i, line in enumerate(lines) if "Fatal Python error" in line), default=None)
    found = [line.strip() for line in lines[fatal:] if part in line] if fatal is not None else []
    return found[0] if found else ""


def where_it_hangs(stacks: Path) -> str:
    """The innermost line of the main thread, which is written last."""
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    thread = text.split("Thread 0x")[-1]
    found = [line.strip() for line in thread.splitlines() if line.strip().startswith("File ")]
    return found[0] if found else "no stack was written"
