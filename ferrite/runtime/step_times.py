"""How long each kernel and each call of a host program takes, call by call: for a report that measures.

Runs of kernels are cut into launches, which run one by one, and on a GPU everything is waited for: the whole is slower
than what a user would run, the parts are what they are.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_KEPT_TIMES = 200  # of one step


@dataclass
class OneStep:
    """Of one launch or call: its seconds, the first of them, and how often it ran."""

    seconds: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if len(self.seconds) < MAX_KEPT_TIMES:
            self.seconds.append(seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class StepTimes:
    """`launches`: by the number of the run and the place in it. `calls`: by the line of the host program, from 1."""

    launches: dict[tuple[int, int], OneStep] = field(default_factory=dict)
    calls: dict[int, OneStep] = field(default_factory=dict)

    def run(self, number: int, launches: Sequence[Callable[..., int]], device: str) -> Callable[..., int]:
        """A run as its launches, each of which is measured."""
        wait = waiting(device)

        def measured(*words: int) -> int:
            for place, launch in enumerate(launches):
                wait()
                start = time.perf_counter()
                launch(*words)
                wait()
                self.launches.setdefault((number, place), OneStep()).add(time.perf_counter() - start)
            return 0

        return measured

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that host programs call, measured by the line that calls it."""
        wait = waiting("cuda" if torch.cuda.is_available() else "cpu")

        def measured(*args: Any, **kwargs: Any) -> Any:
            line = sys._getframe(1).f_lineno
            wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            self.calls.setdefault(line, OneStep()).add(time.perf_counter() - start)
            return result

        return measured


def waiting(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
