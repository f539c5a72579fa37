"""The communication of what was compiled, as a table and as a picture in letters."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ferrite.passes import CommunicationRecord
from ferrite.runtime import MeasuredRun

PICTURE_LETTERS = 72  # in a row of it
MAX_ROWS = 40


@dataclass(frozen=True)
class Communication:
    """The collectives of each graph, by its direction. Seconds are forecasts of the cost model; `measured` are those of
    the last run of each graph, None where it has not run."""

    graphs: tuple[tuple[str, CommunicationRecord], ...]
    measured: tuple[MeasuredRun | None, ...] = ()

    @property
    def collectives(self) -> int:
        return sum(len(each.collectives) for _, each in self.graphs)

    @property
    def seconds(self) -> float:
        return sum(each.seconds for _, each in self.graphs)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed, as something is waited for."""
        return sum(each.exposed for _, each in self.graphs)

    @property
    def hidden(self) -> float:
        """The part of communication that nobody waits for, from 0 to 1."""
        return 1.0 if not self.seconds else max(1 - self.exposed / self.seconds, 0.0)

    @property
    def measured_waits(self) -> float:
        """Seconds that the last runs of all graphs were in waits."""
        return sum(run.waited for run in self.measured if run is not None)

    @property
    def bytes_per_group(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, record in self.graphs:
            for each in record.collectives:
                found[each.group] = found.get(each.group, 0) + each.bytes
        return found

    def why(self, collective: str) -> str:
        """Why a collective is waited for, or was not merged or moved further: by the name of its node, or its line."""
        every = [(kind, each) for kind, record in self.graphs for each in record.collectives]
        found = [
            f"{each.node} of the {kind} graph: {each.why or 'nobody waits for it'}"
            for kind, each in every
            if collective in (each.node, each.line.place if each.line is not None else None)
        ]
        have = ", ".join(dict.fromkeys(each.node for _, each in every)) or "none"
        return "\n".join(found) or f"no collective is {collective}; there are: {have}"

    def timeline(self) -> str:
        """What is computed, and what each group sends, from left to right; `!` where one waits. Below, the same as it
        was measured when the graph last ran, up to where each wait was over."""
        return "\n\n".join(pictures(kind, record, run) for kind, record, run in self.with_runs() if record.collectives)

    def with_runs(self) -> Iterator[tuple[str, CommunicationRecord, MeasuredRun | None]]:
        """Each graph with its last run, if that has the collectives of the forecast."""
        for place, (kind, record) in enumerate(self.graphs):
            run = self.measured[place] if place < len(self.measured) else None
            is_same = run is not None and len(run.collectives) == len(record.collectives)
            yield kind, record, run if is_same else None

    def __str__(self) -> str:
        if not self.collectives:
            return "no collectives"
        buffer = io.StringIO()
        console = Console(file=buffer, width=max(shutil.get_terminal_size((130, 24)).columns, 130), highlight=False)
        for kind, record, run in self.with_runs():
            if record.collectives:
                console.print(table_of(kind, record, run))
                console.print(summary(record, run))
        return buffer.getvalue().rstrip()


def table_of(kind: str, record: CommunicationRecord, run: MeasuredRun | None) -> Table:
    title = f"collectives of the {kind} graph"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    numbers = ("ranks", "members", "bytes", "from us", "to us", "waited us")
    measured = ("measured from", "to", "waited") if run is not None else ()
    for column in ("kind", "group", *numbers[:3], "of", *numbers[3:], *measured, "line", "why"):
        is_number = column in numbers or column in measured
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for number, each in enumerate(record.collectives[:MAX_ROWS]):
        times = [each.begin, each.end, each.exposed]
        if run is not None:
            found = run.collectives[number]
            times += [found.begin, found.end, found.waited]
        ranks = f"{each.ranks}, between machines" if each.between_machines else str(each.ranks)
        counts = (ranks, str(each.members), f"{each.bytes:,}")
        place = each.line.place if each.line is not None else ""
        in_us = (f"{value * 1e6:.0f}" for value in times)
        table.add_row(each.kind, each.group, *counts, each.about, *in_us, place, each.why)
    if len(record.collectives) > MAX_ROWS:
        table.add_row(f"and {len(record.collectives) - MAX_ROWS} more")
    return table


def summary(record: CommunicationRecord, run: MeasuredRun | None) -> str:
    def waited(count: int, exposed: float, seconds: float) -> str:
        return f"{count} collectives, {exposed * 1e6:.0f} us of {seconds * 1e6:.0f} waited for"

    captured = record.captured
    before = waited(captured.collectives, captured.exposed, captured.seconds)
    after = waited(len(record.collectives), record.exposed, record.seconds)
    times = f"computing takes {record.compute_seconds * 1e6:.0f} us, all {record.total_seconds * 1e6:.0f}"
    lines = [f"as captured: {before}", f"now: {after}; {times}"]
    if run is not None:
        lines.append(f"measured: {run.waited * 1e6:.0f} us in waits; all {run.seconds * 1e6:.0f}")
    return "\n".join(lines)


def pictures(kind: str, record: CommunicationRecord, run: MeasuredRun | None) -> str:
    groups = [f"{each.group} ({each.ranks})" for each in record.collectives]
    forecast = [(each.begin, each.end, each.exposed) for each in record.collectives]
    found = f"{kind} graph\n{picture(groups, forecast, record.total_seconds)}"
    if run is not None:
        times = [(each.begin, each.end, each.waited) for each in run.collectives]
        found += f"\n{kind} graph, measured\n{picture(groups, times, run.seconds)}"
    return found


def picture(groups: Sequence[str], collectives: Sequence[tuple[float, float, float]], seconds: float) -> str:
    """One row for computing and one for each group. `collectives`: of each, when it begins and ends, and for how long
    one waits for it."""
    total = seconds or 1.0
    waits = [(end - waited, end) for _, end, waited in collectives if waited > 0]
    rows = {"computes": painted("#" * PICTURE_LETTERS, waits, total, "!")}
    for name, (begin, end, _) in zip(groups, collectives, strict=True):
        rows[name] = painted(rows.get(name, "." * PICTURE_LETTERS), [(begin, end)], total, "=")
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {row}" for name, row in rows.items())


def painted(row: str, spans: Sequence[tuple[float, float]], total: float, letter: str) -> str:
    letters = list(row)
    for first, last in spans:
        left, right = (min(int(time / total * PICTURE_LETTERS), PICTURE_LETTERS) for time in (first, last))
        letters[left : max(right, left + 1)] = letter * (max(right, left + 1) - left)
    return "".join(letters[:PICTURE_LETTERS])
