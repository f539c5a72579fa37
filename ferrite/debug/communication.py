"""The communication of what was compiled, as a table and as a picture in letters."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ferrite.passes import CommunicationRecord

PICTURE_LETTERS = 72  # in a row of it
MAX_ROWS = 40


@dataclass(frozen=True)
class Communication:
    """The collectives of each graph, by its direction. Seconds are forecasts of the cost model."""

    graphs: tuple[tuple[str, CommunicationRecord], ...]

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
    def bytes_per_group(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, record in self.graphs:
            for each in record.collectives:
                found[each.group] = found.get(each.group, 0) + each.bytes
        return found

    def timeline(self) -> str:
        """What is computed, and what each group sends, from left to right; `!` where one waits."""
        return "\n\n".join(f"{kind} graph\n{picture(record)}" for kind, record in self.graphs if record.collectives)

    def __str__(self) -> str:
        if not self.collectives:
            return "no collectives"
        buffer = io.StringIO()
        console = Console(file=buffer, width=max(shutil.get_terminal_size((130, 24)).columns, 130), highlight=False)
        for kind, record in self.graphs:
            if record.collectives:
                console.print(table_of(kind, record))
                console.print(summary(record))
        return buffer.getvalue().rstrip()


def table_of(kind: str, record: CommunicationRecord) -> Table:
    title = f"collectives of the {kind} graph"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    numbers = ("ranks", "members", "bytes", "from us", "to us", "waited us")
    for column in ("kind", "group", *numbers[:3], "of", *numbers[3:], "line", "why"):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for each in record.collectives[:MAX_ROWS]:
        times = (f"{value * 1e6:.0f}" for value in (each.begin, each.end, each.exposed))
        counts = (str(each.ranks), str(each.members), f"{each.bytes:,}")
        place = each.line.place if each.line is not None else ""
        table.add_row(each.kind, each.group, *counts, each.about, *times, place, each.why)
    if len(record.collectives) > MAX_ROWS:
        table.add_row(f"and {len(record.collectives) - MAX_ROWS} more")
    return table


def summary(record: CommunicationRecord) -> str:
    def waited(count: int, exposed: float, seconds: float) -> str:
        return f"{count} collectives, {exposed * 1e6:.0f} us of {seconds * 1e6:.0f} waited for"

    captured = record.captured
    before = waited(captured.collectives, captured.exposed, captured.seconds)
    after = waited(len(record.collectives), record.exposed, record.seconds)
    times = f"computing takes {record.compute_seconds * 1e6:.0f} us, all {record.total_seconds * 1e6:.0f}"
    return f"as captured: {before}\nnow: {after}; {times}"


def picture(record: CommunicationRecord) -> str:
    """One row for computing and one for each group."""
    total = record.total_seconds or 1.0
    waits = [(each.end - each.exposed, each.end) for each in record.collectives if each.exposed > 0]
    rows = {"computes": painted("#" * PICTURE_LETTERS, waits, total, "!")}
    for each in record.collectives:
        name = f"{each.group} ({each.ranks})"
        rows[name] = painted(rows.get(name, "." * PICTURE_LETTERS), [(each.begin, each.end)], total, "=")
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {row}" for name, row in rows.items())


def painted(row: str, spans: Sequence[tuple[float, float]], total: float, letter: str) -> str:
    letters = list(row)
    for first, last in spans:
        left, right = (min(int(time / total * PICTURE_LETTERS), PICTURE_LETTERS) for time in (first, last))
        letters[left : max(right, left + 1)] = letter * (max(right, left + 1) - left)
    return "".join(letters[:PICTURE_LETTERS])
