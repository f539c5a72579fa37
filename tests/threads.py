"""Many threads that begin at one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0  # seconds until a thread that does not come back is called a deadlock


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Start all works at one moment, and give back their results in order."""
    barrier = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(position: int, work: Callable[[], Any]) -> None:
        try:
            barrier.wait(PATIENCE)
            results[position] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]
    return results
