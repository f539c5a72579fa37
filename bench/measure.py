"""Timing several functions turn by turn, so that noise of the machine meets all alike."""

from __future__ import annotations

import gc
import itertools
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_per_turn: float = 0.002,
    budget: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each function, one figure per round; each round gives every function one turn.

    There are at least `rounds` rounds, and more until `budget` seconds are spent. Each round has an
    order of its own: whoever comes after a function finds the caches as that left them, and it shall not always be the
    same one. `clock`: `time.thread_time` counts what this thread computes, whatever others do, if it is the only one.
    """
    loops, orders = {}, random.Random(0)
    for function in functions.values():
        warm_up(function)
    for name, function in functions.items():
        start = clock()
        function()
        loops[name] = max(1, int(seconds_per_turn / max(clock() - start, 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + budget
    gc.disable()
    try:
        for turn in itertools.count():
            if turn >= rounds and time.perf_counter() >= end:
                break
            for name in orders.sample(list(functions), len(functions)):
                function, count = functions[name], loops[name]
                start = clock()
                for _ in range(count):
                    function()
                seconds[name].append((clock() - start) / count)
    finally:
        gc.enable()
    return seconds


def warm_up(function: Callable[[], object], calls: int = 10, patience: float = 1.0) -> None:
    """Some calls before the clock runs; fewer of a function that takes long."""
    end = time.perf_counter() + patience
    for _ in range(calls):
        function()
        if time.perf_counter() >= end:
            break


def undisturbed(
    functions: Mapping[str, Callable[[], object]], rounds: int, *, tries: int = 6, patience: float = 40
) -> tuple[dict[str, list[float]], float]:
    """`interleaved`, at a time when nobody else computes here; also the share of the machine that others had.

    Waits for such a time, and measures again if others came meanwhile. The least disturbed try counts.
    """
    best: tuple[dict[str, list[float]], float] | None = None
    for _ in range(tries):
        start = time.monotonic()
        while others_share(lambda: time.sleep(0.5))[1] > QUIET and time.monotonic() - start < patience:
            pass
        outcome = others_share(lambda: interleaved(functions, rounds))
        if best is None or outcome[1] < best[1]:
            best = outcome
        if best[1] <= QUIET:
            break
    assert best is not None
    return best


QUIET = 0.1  # of all cores


def others_share(work: Callable[[], Any]) -> tuple[Any, float]:
    """What work returns, and the share of all cores that other processes had meanwhile; 0 where that is not known."""
    before, own, start = busy_seconds(), time.process_time(), time.monotonic()
    outcome = work()
    busy = busy_seconds() - before - (time.process_time() - own)
    return outcome, max(0.0, busy) / ((time.monotonic() - start) * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used, on Linux."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system = stat.read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / float(os.sysconf("SC_CLK_TCK"))


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of ours / theirs, round by round; below 1 is faster."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return middle, low, high


def machine() -> str:
    cores = f"{os.cpu_count()} cores"
    return f"{platform.machine()}, {cores}, torch {torch.__version__}, Python {platform.python_version()}"


def page(title: str, command: str, lines: list[str]) -> str:
    """The text of a page of results, with the command that made them and the machine."""
    head = [f"# {title}", "", f"Command: `{command}`  ", f"Machine: {machine()}", ""]
    return "\n".join([*head, *lines]) + "\n"


def write(name: str, title: str, lines: list[str]) -> None:
    """Write bench/results/NAME-MACHINE.md with the command and the machine, and print it."""
    threads = os.environ.get("OMP_NUM_THREADS")
    command = f"python -m {sys.modules['__main__'].__spec__.name} {' '.join(sys.argv[1:])}".strip()
    command = f"OMP_NUM_THREADS={threads} {command}" if threads else command
    text = page(title, command, lines)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{platform.machine()}.md").write_text(text)
    print(text)
