"""One try: a check runs in a child of this process, with options that it cannot change, and this process looks on.

A child may fail, crash, hang or be killed. It tells what it has compiled, line by line through a pipe, as soon as it
knows: what it said before a crash is known. This process computes nothing itself, so a fork costs a few milliseconds
and imports nothing again.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ferrite.debug import Compilation, forget_compiles, log
from ferrite.errors import CompilerBug
from ferrite.options import force
from ferrite.pipeline import PassRecord
from ferrite.runtime import ready_for_forks

Kind = Literal["good", "wrong", "error", "crash", "hang", "slow"]  # the last is for `search` to say
Check = Callable[[], Any]
# Nothing of a try is kept, and none is answered from what an earlier one left.
ALWAYS: Mapping[str, Any] = {"cache": False, "keep_repro": False, "progress": "off"}
REPEATS = 3  # of what takes too long: it may be the machine that was busy
MAX_PRINTED_CHARACTERS = 2000  # of what a child printed, the last ones


class ResultsDiffer(AssertionError):
    """Compiled and eager results differ."""


@dataclass(frozen=True)
class TryResult:
    """How a try went. `cost`: what the check gave, if that is a number. `compiles`: what was compiled, by the numbers
    of the graphs, as far as it came. `stage`: of the compiler, where that failed."""

    kind: Kind
    about: str = ""
    cost: float | None = None
    stage: str = ""
    compiles: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    printed: str = ""

    @property
    def failures(self) -> list[str]:
        """Stages that failed, and the graph ran in eager."""
        return [each for about in self.compiles.values() for each in about["failures"]]


class Prober:
    """Runs a check in children. `seconds`: how long one may take."""

    def __init__(self, check: Check, seconds: float = 600.0) -> None:
        self.check, self.seconds, self.count = check, seconds, 0
        ready_for_forks()
        gc.collect()
        gc.freeze()  # else every child would go through all that this process has, and copy it

    def run(self, settings: Mapping[str, Any], check: Check | None = None, limit: float = math.inf) -> TryResult:
        """`limit`: what costs more is tried again, and the least counts."""
        found = self.run_once(settings, check)
        for _ in range(REPEATS):
            if found.cost is None or found.cost <= limit:
                break
            again = self.run_once(settings, check)
            found = again if again.cost is not None and again.cost < found.cost else found
        return found

    def run_once(self, settings: Mapping[str, Any], check: Check | None) -> TryResult:
        self.count += 1
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as printed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                child = os.fork()
            if child == 0:
                os.close(reading)
                gc.disable()
                in_child(check or self.check, {**ALWAYS, **settings}, writing, printed.fileno())
            os.close(writing)
            lines, status = told_by(child, reading, self.seconds)
            printed.seek(0)
            text = printed.read().decode(errors="replace")[-MAX_PRINTED_CHARACTERS:]
        return result_of(lines, status, text, self.seconds)


def warm_up() -> None:
    """Compile something small, so that children need not load the compiler each for itself."""
    compiled: Any = torch.compile(torch.sin, backend="ferrite", options={**ALWAYS})
    with torch.no_grad():
        compiled(torch.ones(2))
    torch.compiler.reset()


def told_by(child: int, reading: int, seconds: float) -> tuple[list[dict[str, Any]], int | None]:
    """What a child says until it ends, and its exit status; None for one that was killed since it took too long."""
    end, text, closed = time.monotonic() + seconds, b"", False
    status: int | None = None
    try:
        while status is None and time.monotonic() < end:
            if closed:
                time.sleep(0.002)
            elif select.select([reading], [], [], 0.1)[0]:
                more = os.read(reading, 1 << 16)
                text, closed = text + more, not more
                if more:
                    continue
            done, found = os.waitpid(child, os.WNOHANG)
            status = found if done else None
    finally:  # it is too late, or somebody stops the whole: no child outlives its try
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reading)
    return [json.loads(line) for line in text.decode().split("\n")[:-1]], status


def result_of(lines: list[dict[str, Any]], status: int | None, printed: str, seconds: float) -> TryResult:
    compiles = {line["graph"]: line for line in lines if "graph" in line}
    if lines and "kind" in lines[-1]:
        return TryResult(**lines[-1], compiles=compiles, printed=printed)
    if status is None:
        return TryResult("hang", f"still running after {seconds:.0f} s", compiles=compiles, printed=printed)
    code = os.waitstatus_to_exitcode(status)
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return TryResult("crash", name, compiles=compiles, printed=printed)


# --- in the child -----------------------------------------------------------------------------------------------------


def in_child(check: Check, settings: Mapping[str, Any], writing: int, printed: int) -> None:
    """Never returns."""
    try:
        for stream in (1, 2):
            os.dup2(printed, stream)
        warnings.simplefilter("ignore")
        force(settings)
        forget_compiles()
        torch.compiler.reset()
        log.addHandler(Teller(writing))
        log.setLevel(logging.DEBUG)
        log.propagate = False
        tell(writing, verdict(check))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def tell(writing: int, about: Mapping[str, Any]) -> None:
    text = memoryview((json.dumps(about) + "\n").encode())
    while text:
        text = text[os.write(writing, text) :]


def verdict(check: Check) -> dict[str, Any]:
    """What a check comes to: it raises, or gives False, or seconds, or anything else where all is well."""
    try:
        found = check()
    except AssertionError as problem:
        return {"kind": "wrong", "about": first_line(problem)}
    except CompilerBug as problem:
        return {"kind": "error", "about": problem.lines.get("because", ""), "stage": problem.stage}
    except Exception as problem:
        bug = inner_bug(problem)
        if bug is not None:
            return {"kind": "error", "about": bug.lines.get("because", ""), "stage": bug.stage}
        return {"kind": "error", "about": f"{type(problem).__name__}: {first_line(problem)}"}
    if found is False:
        return {"kind": "wrong", "about": "the check gave False"}
    cost = float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
    return {"kind": "good", "cost": cost}


def inner_bug(problem: BaseException | None) -> CompilerBug | None:
    while problem is not None and not isinstance(problem, CompilerBug):
        problem = problem.__cause__ or problem.__context__
    return problem


def first_line(problem: BaseException) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


class Teller(logging.Handler):
    """Tells what is compiled at the end of every stage."""

    def __init__(self, writing: int) -> None:
        super().__init__(logging.DEBUG)
        self.writing = writing

    def emit(self, record: logging.LogRecord) -> None:
        compilation = getattr(record, "compilation", None)
        if compilation is not None:
            tell(self.writing, about_compilation(compilation))


def about_compilation(compilation: Compilation) -> dict[str, Any]:
    record = compilation.record
    passes = [about_pass(each) for some in record.passes.values() for each in some]
    passes += [about_pass(each) for graph in record.graphs for each in graph.passes]
    kernels = [
        {"name": kernel.name, "operators": kernel.operators, "lines": list(map(str, kernel.lines))}
        for graph in record.graphs
        for kernel in graph.kernels
    ]
    return {
        "graph": record.number,
        "line": str(record.line or ""),
        "skip": record.options.skip,
        "freeze": record.options.freeze,
        "executor": record.options.executor,
        "passes": passes,
        "kernels": kernels,
        "spent": {stage: fuel.spent for stage, fuel in compilation.fuels.items()},
        "failures": [graph.failure for graph in record.graphs if graph.failure is not None],
    }


def about_pass(record: PassRecord) -> dict[str, Any]:
    ran = not record.note
    return {"name": record.name, "ran": ran, "changed": record.changed, "rewrites": dict(record.rewrites)}
