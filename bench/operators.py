"""Every entry of torch's own tables, compiled and compared with eager: which operators are right, in which ways.

    python -m bench.operators --out bench/results/operators.md
    python -m bench.operators softmax --dtypes float32 int64 --ways static dynamic backward --layouts "as given" empty

Entries run in child processes, a few in each. A call that kills or hangs its child is a verdict too (`crashed`,
`hung`), and the rest goes on in the next child. Verdicts are kept beside the table (`.jsonl`) as they
come: the same command again goes on where the last one was stopped. `--again` asks anew about what failed.

Calls are compiled together, a dozen in one function; what does not pass so is judged alone (`--alone`:
everything is).

The table says what was asked, and how many calls there were: a sweep that covers less than the last one can be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import RESULTS
from tests.tables.entries import WAYS, Entry, dtypes_of, entries, samples
from tests.tables.judge import FAILURES, judge, ours, quiet
from tests.tables.layouts import LAYOUTS
from tests.tables.together import AT_ONCE, judge_together

ENTRIES_AT_ONCE = 24  # in one child
PATIENCE = 90  # seconds for one call, until its child is taken for hanging
BAD = ("crashed", "hung", *FAILURES)
DTYPES = ("float32", "int64", "bool", "bfloat16", "complex64")
Record = dict[str, Any]
Plan = list[tuple[str, str, str]]  # type, way, layout


def plan_of(entry: Entry, chosen: argparse.Namespace) -> Plan:
    """What to try with an entry. Numbers at the edges are for functions of single elements alone."""
    found = []
    for way in chosen.ways:
        known = {str(dtype)[6:] for dtype in dtypes_of(entry, way)}
        dtypes = ["float32"] if way == "errors" else known if "all" in chosen.dtypes else chosen.dtypes
        for dtype in sorted(known.intersection(dtypes), key=lambda name: (name != "float32", name)):
            for layout in ["as given"] if way == "errors" or entry.kind == "optimizer" else chosen.layouts:
                if layout != "edges" or entry.takes_edges:
                    found.append((dtype, way, layout))
    return found


def keys(entry: Entry, part: tuple[str, str, str], limit: int) -> Iterator[tuple[str, Any]]:
    """The calls of one part by name, the same ones each time."""
    dtype, way, layout = part
    count = 1000 if way == "errors" else limit if layout == "as given" else 1
    torch.manual_seed(0)
    for place, sample in enumerate(samples(entry, getattr(torch, dtype), way, count)):
        yield f"{entry.name}|{dtype}|{way}|{layout}|{place}", sample


# --- the child --------------------------------------------------------------------------------------------------------


def work(plans: Sequence[tuple[Entry, Plan]], limit: int, known: set[str], alone: set[str] | None, pipe: int) -> None:
    """Tell the parent of every call: that it begins, and its verdict."""

    def tell(**what: Any) -> None:
        os.write(pipe, (json.dumps(what) + "\n").encode())

    quiet()
    for way in WAYS:
        calls: list[tuple[str, tuple[Entry, Any, str]]] = []
        for entry, part in [(entry, part) for entry, plan in plans for part in plan if part[1] == way]:
            try:
                found = [(key, (entry, sample, part[2])) for key, sample in keys(entry, part, limit)]
                calls += [call for call in found if call[0] not in known]
            except Exception as problem:  # torch's own samples fail for some types
                key = f"{entry.name}|{'|'.join(part)}|-"
                if key not in known:
                    tell(key=key, kind="foreign", why=f"no samples: {problem}"[:200])
        can = alone is not None and way in AT_ONCE
        several = [call for call in calls if can and call[0] not in (alone or ())]
        passed = set()
        for start in range(0, len(several), AT_ONCE.get(way, 1)):
            some = several[start : start + AT_ONCE[way]]
            tell(together=[key for key, _ in some])
            begin = time.perf_counter()
            verdicts = judge_together([call for _, call in some], way)
            seconds = round((time.perf_counter() - begin) / len(some), 2)
            for (key, _), verdict in zip(some, verdicts, strict=True):
                if verdict is not None:
                    passed.add(key)
                    tell(key=key, kind=verdict.kind, why="", seconds=seconds)
        for key, (entry, sample, layout) in calls:
            if key not in passed:
                tell(begins=key)
                begin = time.perf_counter()
                verdict = judge(entry, sample, layout, way, lambda key=key: tell(compiles=key))
                tell(key=key, kind=verdict.kind, why=verdict.why[:300], seconds=round(time.perf_counter() - begin, 2))


def in_child(
    plans: Sequence[tuple[Entry, Plan]], limit: int, known: set[str], alone: set[str] | None
) -> Iterator[Record]:
    """The verdicts of some entries, from as many children as it takes. `alone`: what is not compiled with others; None
    if nothing is."""
    while True:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            mute()
            try:
                work(plans, limit, known, alone, writing)
            finally:
                os._exit(0)
        os.close(writing)
        begun: list[str] = []
        kind, by_eager = "crashed", False
        for record in records(reading):
            if record is None:
                kind = "hung"
                os.kill(child, signal.SIGKILL)
                break
            by_eager = "begins" in record
            begun = record.get("together", [record[way] for way in ("begins", "compiles") if way in record])
            if "key" in record:
                known.add(record["key"])
                yield record
        os.close(reading)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if not begun:
            if code:
                yield {
                    "key": f"{plans[0][0].name}|-|-|-|-",
                    "kind": "crashed",
                    "why": f"exit status {code} between calls",
                }
            return
        if len(begun) > 1 and alone is not None:
            alone.update(begun)
            continue
        known.update(begun)
        why = f"exit status {code}" if kind == "crashed" else f"{PATIENCE} s"
        if by_eager:
            kind, why = "foreign", f"eager itself: {kind}, {why}"
        yield {"key": begun[0], "kind": kind, "why": why}


def warm_up() -> None:
    """Everything that compiling loads is loaded before the first fork: a child takes seconds otherwise."""
    quiet()
    x = torch.ones(8, requires_grad=True)
    for dynamic in (False, True):
        ours(dynamic)(lambda x: x.sin().sum())(x).backward()
    torch.compiler.reset()


def mute() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def records(pipe: int) -> Iterator[Record | None]:
    """What a child tells, line by line; None where it tells nothing for too long."""
    rest = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], PATIENCE)
        if not ready:
            yield None
            return
        more = os.read(pipe, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from map(json.loads, lines)


# --- the table --------------------------------------------------------------------------------------------------------


def table_of(found: Sequence[Record]) -> str:
    """Totals, then one row for each entry with a failure, then the entries without."""
    by_entry: dict[str, list[Record]] = defaultdict(list)
    for record in found:
        by_entry[record["key"].split("|")[0]].append(record)
    lines = ["# torch's own tables", "", *totals(found, by_entry), "", *coverage(found), "", "## Failures", ""]
    lines += ["| entry | calls | passed | failed | of which |", "|---|---:|---:|---:|---|"]
    for name, rows in sorted(by_entry.items()):
        failed = [row for row in rows if row["kind"] in BAD]
        passed = sum(row["kind"] in ("passed", "uncompiled") for row in rows)
        if failed:
            lines.append(f"| {name} | {len(rows)} | {passed} | {len(failed)} | {reasons(failed)} |")
    lines += [
        "",
        "## Entries without failures",
        "",
        "| entry | calls | passed | uncompiled | foreign |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, rows in sorted(by_entry.items()):
        count = Counter(row["kind"] for row in rows)
        if not any(count[kind] for kind in BAD):
            lines.append(f"| {name} | {len(rows)} | {count['passed']} | {count['uncompiled']} | {count['foreign']} |")
    return "\n".join(lines) + "\n"


def totals(found: Sequence[Record], by_entry: dict[str, list[Record]]) -> list[str]:
    kinds = ("passed", "uncompiled", "foreign", *BAD)
    lines = [f"torch {torch.__version__}: {len(found)} calls of {len(by_entry)} entries.", ""]
    lines += [f"| | calls | {' | '.join(kinds)} |", f"|---|{'--:|' * (len(kinds) + 1)}"]
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for record in found:
        entry, dtype, way, layout, _ = record["key"].split("|")
        for group in ("all", f"way: {way}", f"layout: {layout}", f"type: {dtype}", f"table: {entry.split(':')[0]}"):
            groups[group][record["kind"]] += 1
    for group, count in sorted(groups.items()):
        lines.append(f"| {group} | {count.total()} | {' | '.join(str(count[kind]) for kind in kinds)} |")
    return lines


def coverage(found: Sequence[Record]) -> list[str]:
    """How many of the entries that could be asked were: what has no line was not."""
    asked: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for record in found:
        name, dtype, way, layout, _ = record["key"].split("|")
        if dtype != "-":
            asked[name.split(":")[0], way, dtype, layout].add(name)
    lines = ["## What was asked", "", "| table | way | type | layout | entries | of |", "|---|---|---|---|--:|--:|"]
    for (table, way, dtype, layout), names in sorted(asked.items()):
        could = [
            entry
            for name, entry in entries().items()
            if name.startswith(f"{table}:") and getattr(torch, dtype) in dtypes_of(entry, way)
        ]
        could = [entry for entry in could if layout != "edges" or entry.takes_edges]
        could = [entry for entry in could if way != "errors" or has_errors(entry)]
        lines.append(f"| {table} | {way} | {dtype} | {layout} | {len(names)} | {len(could)} |")
    return lines


def has_errors(entry: Entry) -> bool:
    return any(getattr(entry.info, name, None) for name in ("error_inputs_func", "module_error_inputs_func"))


def reasons(failed: Sequence[Record]) -> str:
    """Each kind of failure once, with how often and the first call that shows it."""
    first: dict[str, Record] = {}
    count = Counter(record["kind"] for record in failed)
    for record in failed:
        first.setdefault(record["kind"], record)
    told = [
        f"{kind} ({count[kind]}): {' '.join(first[kind]['key'].split('|')[1:])}: {first[kind]['why'].strip()}"
        for kind in BAD
        if kind in first
    ]
    return "<br>".join(told).replace("|", "\\|").replace("\n", " ")


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; none means all")
    parser.add_argument("--out", type=Path, default=RESULTS / "operators.md")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), help="or `all`")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["static"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["as given"])
    parser.add_argument("--samples", type=int, default=2, help="calls of each kind; other layouts take the first (2)")
    parser.add_argument("--again", action="store_true", help="ask anew about what failed")
    parser.add_argument("--alone", action="store_true", help="compile each call alone")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long; the next run goes on")
    chosen = parser.parse_args(argv)
    log = chosen.out.with_suffix(".jsonl")
    known = {row["key"]: row for row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    if chosen.again:
        wanted = [row["key"] for row in known.values() if row["kind"] in BAD and named(row["key"], chosen.names)]
        known = {key: row for key, row in known.items() if key not in wanted}
        log.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
    warm_up()
    end = time.monotonic() + chosen.minutes * 60
    with log.open("a") as file:
        plans = [(entry, plan_of(entry, chosen)) for name, entry in entries().items() if named(name, chosen.names)]
        for start in range(0, len(plans), count := 1 if chosen.alone else ENTRIES_AT_ONCE):
            if time.monotonic() > end:
                break
            some = plans[start : start + count]
            for record in in_child(some, chosen.samples, set(known), None if chosen.alone else set()):
                known[record["key"]] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record["kind"] in BAD:
                    print(record["kind"], record["key"], record["why"], file=sys.stderr, flush=True)
    text = table_of(list(known.values()))
    chosen.out.write_text(text)
    print(text.split("## Failures")[0])


def named(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in name.split("|")[0] for part in parts)


if __name__ == "__main__":
    main()
