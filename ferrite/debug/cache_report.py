"""`ferrite.explain_cache()`: which graphs of the last compilation came from the cache, and why the others did not."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ferrite.cache import Difference, Outcome, explain
from ferrite.debug.record import last_compile

# Components that follow from others: their digests tell a reader nothing where something else differs as well.
FOLLOW = ("calls", "values", "names", "tags", "strides", "operators", "constants", "text")
MAX_DIFFERENCES_SHOWN = 12  # differences


@dataclass(frozen=True)
class Explained:
    """A question to the cache; for a miss, the digest of the nearest older entry and what differs from it."""

    outcome: Outcome
    nearest: str = ""
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class CacheReport:
    """Printing it is its purpose; the rest is the same as data. `captured`: what passes make of the graph of torch
    calls; `joint`: of that of forward and backward; `graphs`: what its functional graphs compile to."""

    graphs: tuple[Explained, ...]
    captured: Explained | None = None
    joint: Explained | None = None

    def __str__(self) -> str:
        everything = [each for each in (self.captured, self.joint, *self.graphs) if each is not None]
        if not everything:
            return "the last compilation did not ask the cache"
        buffer = io.StringIO()
        console = Console(file=buffer, width=shutil.get_terminal_size((110, 24)).columns, highlight=False)
        for explained in everything:
            console.print(headline(explained), markup=False)
            if explained.differences:
                console.print(differences_table(explained.differences))
        return buffer.getvalue().rstrip()


def explain_cache() -> CacheReport:
    """What the cache had for the graphs of the newest compilation in this process, and what was missing."""
    record = last_compile()
    captured, joint = (None if each is None else explained(each) for each in (record.captured, record.joint))
    return CacheReport(tuple(map(explained, record.cache)), captured, joint)


def explained(outcome: Outcome) -> Explained:
    found = explain(outcome) if outcome.result == "miss" else None
    return Explained(outcome) if found is None else Explained(outcome, found[0].digest, tuple(found[1]))


def headline(explained: Explained) -> str:
    outcome = explained.outcome
    text = f"{outcome.what}: {outcome.result}"
    if outcome.reason:
        text += f", {outcome.reason}"
    if outcome.key is not None and outcome.result in ("hit", "miss"):
        text += f", entry {outcome.key.digest[:12]}, {outcome.seconds * 1e3:.1f} ms"
    if outcome.result != "miss":
        return text
    if not explained.nearest:
        return f"{text}\n  there was no entry to compare with"
    if any(each.name == "operators" for each in explained.differences):
        return f"{text}\n  no entry had these operators; the nearest, {explained.nearest[:12]}, differs in"
    return f"{text}\n  the nearest entry, {explained.nearest[:12]}, differs in"


def differences_table(found: Sequence[Difference]) -> Table:
    """What differs, the facts that a reader can act on first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=True)
    for column in ("component", "there", "here"):
        table.add_column(column, overflow="fold")
    telling = [each for each in found if each.name not in FOLLOW]
    for each in (telling or list(found))[:MAX_DIFFERENCES_SHOWN]:
        table.add_row(each.name, side(each.there), side(each.here))
    if len(telling) > MAX_DIFFERENCES_SHOWN:
        table.add_row(f"and {len(telling) - MAX_DIFFERENCES_SHOWN} more", "", "")
    return table


def side(text: str | None) -> str:
    if text is None:
        return "-"
    return text.replace("[", r"\[") or "nothing"


def age(since: float) -> str:
    """How long ago a time was, in the unit that fits.

    >>> age(time.time() - 7300)
    '2 h'
    """
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
