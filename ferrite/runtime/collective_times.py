"""When the collectives of a host program began, and how long it waited for them, the last time it ran: what a forecast
is held against.

Times are those of the thread that runs the program. On a CPU a collective that is waited for is over when the wait is;
on a GPU a wait only orders what comes behind it, so that these are the times at which work was handed on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ferrite.runtime.collective_errors import operator_in, start_of


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective, in seconds since its program began: the call that begins it, the end of the last wait for it, and
    how long that thread was in waits for it. `operator`: what begins it."""

    operator: str
    begin: float
    end: float
    waited: float


@dataclass(frozen=True)
class MeasuredRun:
    """The collectives of one run, in the order in which they began, and the seconds of all of it."""

    collectives: tuple[MeasuredCollective, ...]
    seconds: float

    @property
    def waited(self) -> float:
        return sum(each.waited for each in self.collectives)


WITH_PRODUCTS = "fused_"  # collectives that are parts of products, over when these are
Note = tuple[int, float, float]  # a call: its row, when it began, when it returned


class CollectiveTimes:
    """The last run of a host program of such rows. Several threads may run it; each notes its own."""

    def __init__(self, rows: Sequence[str] = ()) -> None:
        self.rows = rows
        self.running = threading.local()
        self.last: tuple[float, float, list[Note]] | None = None

    def noted(self, row: int, begin: float, end: float) -> None:
        notes = getattr(self.running, "notes", None)
        if notes is not None:
            notes.append((row, begin, end))

    def timed(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The same function; when it returns, its run is the last one."""

        @functools.wraps(function)
        def run(args: list[Any]) -> Any:
            notes: list[Note] = []
            before = getattr(self.running, "notes", None)
            self.running.notes = notes
            begin = time.perf_counter()
            try:
                result = function(args)
                self.last = begin, time.perf_counter(), notes
                return result
            finally:
                self.running.notes = before

        return run

    def run(self) -> MeasuredRun | None:
        """None before the first."""
        if self.last is None:
            return None
        begin, end, notes = self.last
        begun: dict[int, Note] = {}  # by row: what began there last
        order: list[Note] = []
        waits: dict[Note, list[Note]] = {}
        for note in notes:
            row = start_of(self.rows, note[0])
            if row is not None and operator_in(self.rows[row]).startswith(WITH_PRODUCTS):
                continue
            if row == note[0]:
                begun[row] = note
                order.append(note)
            elif row in begun:
                waits.setdefault(begun[row], []).append(note)
        found = []
        for note in order:
            ends = waits.get(note, [])
            waited = sum(over - start for _, start, over in ends)
            last = max((over for _, _, over in ends), default=note[2])
            found.append(MeasuredCollective(operator_in(self.rows[note[0]]), note[1] - begin, last - begin, waited))
        return MeasuredRun(tuple(found), end - begin)
