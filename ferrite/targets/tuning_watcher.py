"""Whoever watches while something is measured: what comes next, what was found, and whether there is time for more.

A compile that measures asks the watcher of its process; `python -m ferrite tune` is one. Without any there is all the
time in the world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ferrite.tune import Found, Problem


class OutOfTime(Exception):
    """The watcher has no time for the rest of a problem: what was measured of it says nothing."""


class TuningWatcher:
    """All that can be asked and told; does nothing."""

    def has_time(self) -> bool:
        return True

    def begins(self, problem: Problem, ways: int) -> None:
        """So many ways to do it are about to be timed."""

    def tried(self) -> None:
        """One of them was."""

    def finished(self, problem: Problem, found: Found | None) -> None:
        """None: there was nothing to be found."""

    def known(self, problem: Problem, found: Found) -> None:
        """It was measured before."""

    def left(self, problem: Problem) -> None:
        """There was no time for it."""


_watchers = [TuningWatcher()]


def watcher() -> TuningWatcher:
    return _watchers[-1]


@contextlib.contextmanager
def watched_by(new: TuningWatcher) -> Iterator[None]:
    """Of this process: a backward graph is compiled in a thread of autograd's."""
    _watchers.append(new)
    try:
        yield
    finally:
        _watchers.remove(new)
