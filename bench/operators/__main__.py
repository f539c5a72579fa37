"""Every entry of torch's own tables, compiled and compared with eager: which operators are right, in which ways.

    python -m bench.operators --out bench/results/operators.md
    python -m bench.operators softmax --dtypes float32 int64 --ways static dynamic backward --layouts "as given" empty
    python -m bench.operators --dtypes all --ways all --layouts all --samples 1 --workers 16 --seconds 240

Calls run in child processes. One that kills or hangs its child is a verdict too (`crashed`, `hung`), and the rest
goes on in the next child. They come in an order in which a sweep that was stopped (`--seconds`) is a fair sample.
Verdicts are kept beside the page (`.jsonl`) as they come: the same command again goes on where the last one was
stopped. `--again` asks anew about what failed; `--page` only writes the page.

Calls are compiled together, a dozen in one function; what does not pass so is judged alone (`--alone`:
everything is).

The page says what was asked, and how many calls there were: a sweep that covers less than the last one can be seen.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import RESULTS
from bench.operators.children import Record, Sweep
from bench.operators.order import Task, parts_of, tasks_of
from bench.operators.table import BAD, page_of, part_of
from tests.tables.entries import WAYS, entries
from tests.tables.layouts import LAYOUTS

DTYPES = ("float32", "int64", "bool", "bfloat16", "complex64")
SAID_EVERY = 10.0  # seconds between two lines of progress


class Log:
    """What is known, kept in a file as it comes: lines that describe a run, and after each the verdicts of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Record] = []
        self.known: dict[str, Record] = {}
        for row in map(json.loads, path.read_text().splitlines()) if path.exists() else ():
            self.take(row)

    def take(self, row: Record) -> None:
        if "command" in row:
            self.runs.append(row)
        else:
            self.known[row["key"]] = {**row, "run": max(0, len(self.runs) - 1)}

    def add(self, *rows: Record) -> None:
        with self.path.open("a") as file:
            for row in rows:
                self.take(row)
                file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; none means all")
    parser.add_argument("--out", type=Path, default=RESULTS / "operators.md")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), help="or `all`")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "all"], default=["static"])
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, "all"], default=["as given"])
    parser.add_argument("--samples", type=int, default=2, help="calls of each kind; other layouts take the first (2)")
    parser.add_argument("--again", action="store_true", help="ask anew about what failed, and nothing else")
    parser.add_argument("--alone", action="store_true", help="compile each call alone")
    parser.add_argument("--page", action="store_true", help="ask nothing")
    parser.add_argument("--workers", type=int, default=1, help="children at once (1)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long; the next run goes on")
    parser.add_argument("--patience", type=float, default=90, help="seconds for what hangs (90)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (0)")
    chosen = parser.parse_args(argv)
    log = Log(chosen.out.with_suffix(".jsonl"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not chosen.page:
            ask(log, chosen, shlex.join(["python", "-m", "bench.operators", *(sys.argv[1:] if argv is None else argv)]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        text = page_of(log.runs, list(log.known.values()))
        chosen.out.write_text(text)
    print(text.split("## What was asked")[0])


def ask(log: Log, chosen: argparse.Namespace, command: str) -> None:
    ways = WAYS if "all" in chosen.ways else chosen.ways
    layouts = list(LAYOUTS) if "all" in chosen.layouts else chosen.layouts
    if chosen.again:
        again = [row for row in log.known.values() if row["kind"] in BAD and named(row["key"], chosen.names)]
        parts = dict.fromkeys(map(part_of, again))
        limit = max((int(row["key"].rsplit("|", 1)[1].replace("-", "0")) + 1 for row in again), default=1)
        done = {f"{part.key}|{place}" for part in parts for place in range(limit)} - {row["key"] for row in again}
    else:
        asked = [entry for name, entry in entries().items() if named(name, chosen.names)]
        parts = dict.fromkeys(part for entry in asked for part in parts_of(entry, ways, chosen.dtypes, layouts))
        done, limit = set(log.known), chosen.samples
    tasks = tasks_of(list(parts), chosen.seed)
    if chosen.alone:
        tasks = [Task(task.way, (part,)) for task in tasks for part in task.parts]
    log.add({"command": command, "torch": torch.__version__, "machine": f"{platform.machine()}, {platform.system()}"})
    begin = said = time.monotonic()
    count: Counter[str] = Counter()
    sweep = Sweep(
        tasks,
        done,
        workers=chosen.workers,
        limit=limit,
        patience=chosen.patience,
        seconds=chosen.seconds,
    )
    for record in sweep.verdicts():
        log.add(record)
        count[record["kind"]] += 1
        if record["kind"] in BAD:
            print(record["kind"], record["key"], record["why"], file=sys.stderr, flush=True)
        if time.monotonic() - said > SAID_EVERY:
            said = time.monotonic()
            print(progress(said - begin, count, len(sweep.waiting), len(tasks)), file=sys.stderr, flush=True)


def progress(seconds: float, count: Counter[str], waiting: int, tasks: int) -> str:
    kinds: list[tuple[str, Any]] = sorted(count.items())
    return (
        f"{seconds:.0f} s: {max(0, tasks - waiting)} of {tasks} tasks, {', '.join(f'{n} {kind}' for kind, n in kinds)}"
    )


def named(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in name.split("|")[0] for part in parts)


if __name__ == "__main__":
    main()
