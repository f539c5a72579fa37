"""How long something takes, for reports and for people. What the compiler decides by is measured elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def wait_for_gpus() -> None:
    """Until all is done that this process has asked its GPU for, if it has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def least_seconds(
    work: Callable[..., object], rounds: int = 5, seconds: float = 0.0, arguments: Callable[[], tuple[Any, ...]] = tuple
) -> float:
    """The least that one of some rounds takes, at least so many, and for at least so many `seconds`. A round before
    them does not count: it compiles, and fills caches. `arguments`: made for each round, outside of its time."""
    work(*arguments())
    best, done, end = float("inf"), 0, time.perf_counter() + seconds
    while done < rounds or time.perf_counter() < end:
        given = arguments()
        wait_for_gpus()
        start = time.perf_counter()
        work(*given)
        wait_for_gpus()
        best, done = min(best, time.perf_counter() - start), done + 1
    return best
