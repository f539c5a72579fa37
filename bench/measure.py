"""Timing several functions turn by turn, so that noise of the machine meets all alike."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, seconds_per_turn: float = 0.002
) -> dict[str, list[float]]:
    """Seconds per call of each function, one figure per round; each round gives every function one turn."""
    loops = {}
    for name, function in functions.items():
        for _ in range(10):
            function()
        start = time.perf_counter()
        function()
        loops[name] = max(1, int(seconds_per_turn / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(functions)
            names = names[turn % len(names) :] + names[: turn % len(names)]
            for name in names:
                function, count = functions[name], loops[name]
                start = time.perf_counter()
                for _ in range(count):
                    function()
                seconds[name].append((time.perf_counter() - start) / count)
    finally:
        gc.enable()
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of ours / theirs, round by round; below 1 is faster."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def write(name: str, title: str, lines: list[str]) -> None:
    """Write bench/results/NAME-MACHINE.md with the command and the machine, and print it."""
    command = f"python -m {sys.modules['__main__'].__spec__.name} {' '.join(sys.argv[1:])}".strip()
    head = [
        f"# {title}",
        "",
        f"Command: `{command}`  ",
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{platform.machine()}.md").write_text(text)
    print(text)
