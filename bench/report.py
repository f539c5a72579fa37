"""What the programs share around the measuring: arguments, a progress bar, tables, summaries, files."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.measure import RESULTS, machine, page

Item = TypeVar("Item")
Row = dict[str, Any]
Rows = Sequence[Sequence[str]]


def parser_for(module_doc: str | None, rounds: int, seconds: float) -> argparse.ArgumentParser:
    """The arguments that all programs take."""
    parser = argparse.ArgumentParser(description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", "--filter", nargs="+", default=[], metavar="PATTERN", help="cases with one of these in the name")
    add("--quick", action="store_true", help="a few cases and few rounds: to see that it works, not to quote")
    add("--rounds", type=int, help=f"at least so many turns of each backend ({rounds})")
    add("--seconds", type=float, help=f"and more turns for so long, per case ({seconds:g})")
    add("--threads", type=int, default=2, help="threads of torch (2)")
    add("--no-inductor", action="store_true", help="compare with eager alone")
    add(
        "--write",
        nargs="?",
        const=str(RESULTS),
        metavar="FOLDER",
        help="write the results as JSON and Markdown, into bench/results/ if no folder is named",
    )
    parser.set_defaults(default_rounds=rounds, default_seconds=seconds)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; also sets the threads and the random seed."""
    chosen = parser.parse_args(argv)
    few = chosen.quick
    if chosen.rounds is None:
        chosen.rounds = max(3, chosen.default_rounds // 4) if few else chosen.default_rounds
    if chosen.seconds is None:
        chosen.seconds = chosen.default_seconds / 4 if few else chosen.default_seconds
    chosen.arguments = list(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    return chosen


def selected(items: Iterable[Item], name: Callable[[Item], str], only: Sequence[str]) -> list[Item]:
    """The items that were asked for: all, or those whose names one of the patterns is found in."""
    found = [item for item in items if not only or any(re.search(pattern, name(item)) for pattern in only)]
    if not found:
        sys.exit(f"no case matches {' or '.join(only)}")
    return found


def watched(items: Sequence[Item], name: Callable[[Item], str]) -> Iterator[Item]:
    """The items one by one, with a progress bar on the error stream."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=name(item))
            yield item
            bar.advance(task)


def one_by_one(
    items: Sequence[Item], name: Callable[[Item], str], measure: Callable[[Item], Row], line: Callable[[Row], str]
) -> list[Row]:
    """A row for each item, and a line of it at once: a whole run takes many minutes. What was measured before the user
    interrupts is kept."""
    rows: list[Row] = []
    try:
        for item in watched(items, name):
            rows.append(measure(item))
            print(line(rows[-1]), file=sys.stderr)
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"interrupted: {len(rows)} of {len(items)} cases were measured", file=sys.stderr)
    return rows


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary_of(speeds: Mapping[str, float]) -> dict[str, Any]:
    """Of speed-ups by case: how many, their geometric mean, the worst, and all below 1."""
    if not speeds:
        return {"cases": 0}
    worst = min(speeds, key=lambda name: speeds[name])
    below = {name: round(speed, 3) for name, speed in sorted(speeds.items(), key=lambda item: item[1]) if speed < 1}
    mean = round(geometric_mean(speeds.values()), 3)
    return {"cases": len(speeds), "mean": mean, "worst": worst, "worst_speed": round(speeds[worst], 3), "below": below}


def summary_lines(title: str, summary: Mapping[str, Any]) -> list[str]:
    if not summary["cases"]:
        return []
    head = f"{title}: {summary['mean']:.2f} times as fast in the geometric mean of {summary['cases']}; "
    lines = [f"{head}least {summary['worst_speed']:.2f}, {summary['worst']}."]
    if summary["below"]:
        cases = ", ".join(f"{name} {speed:.2f}" for name, speed in summary["below"].items())
        lines.append(f"{title}, slower in {len(summary['below'])}: {cases}.")
    return lines


def show(title: str, columns: Sequence[str], rows: Rows, lines: Sequence[str] = ()) -> None:
    """A table on the terminal, and sentences below it."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        first = i == 0
        table.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table)
    for line in lines:
        console.print(line)


def in_markdown(columns: Sequence[str], rows: Rows) -> list[str]:
    escaped = ([cell.replace("|", "/") for cell in row] for row in rows)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in escaped)]


def save(folder: str, name: str, chosen: argparse.Namespace, title: str, lines: list[str], data: Any) -> Path:
    """Write NAME-MACHINE.json and .md into a folder, with the command that made them; gives the JSON's path."""
    command = f"python -m bench.{name} {' '.join(chosen.arguments)}".strip()
    command = re.sub(r" ?--write \S*/\S*", " --write", command)  # where a reader puts them is the reader's matter
    facts = {"command": command, "machine": machine(), "cores": os.cpu_count(), "threads": chosen.threads}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{platform.machine()}"
    (target / f"{stem}.md").write_text(page(title, command, lines))
    path = target / f"{stem}.json"
    path.write_text(json.dumps({"program": name, **facts, **data}, indent=1, allow_nan=False) + "\n")
    print(f"written: {path}", file=sys.stderr)
    return path
