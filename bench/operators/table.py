"""The page: what was asked, how often, and with which verdicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from bench.operators.order import Part, parts_of
from tests.tables.entries import WAYS, entries
from tests.tables.judge import FAILURES
from tests.tables.layouts import LAYOUTS

BAD = ("crashed", "hung", *FAILURES)
KINDS = ("passed", "uncompiled", "foreign", *BAD)
Record = dict[str, Any]


def page_of(runs: Sequence[Record], found: Sequence[Record]) -> str:
    """Runs and totals, then one row for each entry with a failure, then the entries without."""
    by_entry: dict[str, list[Record]] = defaultdict(list)
    for record in found:
        by_entry[part_of(record).name].append(record)
    lines = ["# torch's own tables", "", f"{len(found)} calls of {len(by_entry)} entries.", "", *commands(runs, found)]
    lines += ["", *totals(found), "", *coverage(found), "", "## Failures", ""]
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


def part_of(record: Record) -> Part:
    return Part(*record["key"].split("|")[:4])


def commands(runs: Sequence[Record], found: Sequence[Record]) -> list[str]:
    """Each run of the command, with the calls whose last verdict is from it."""
    lines = ["| command | torch | machine | calls |", "|---|---|---|--:|"]
    count = Counter(record.get("run", 0) for record in found)
    for place, run in enumerate(runs):
        lines.append(f"| `{run['command']}` | {run['torch']} | {run['machine']} | {count[place]} |")
    return lines


def totals(found: Sequence[Record]) -> list[str]:
    lines = [f"| | calls | {' | '.join(KINDS)} |", f"|---|{'--:|' * (len(KINDS) + 1)}"]
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for record in found:
        part = part_of(record)
        for group in (
            "all",
            f"way: {part.way}",
            f"layout: {part.layout}",
            f"type: {part.dtype}",
            f"table: {part.table}",
        ):
            groups[group][record["kind"]] += 1
    for group, count in sorted(groups.items()):
        lines.append(f"| {group} | {count.total()} | {' | '.join(str(count[kind]) for kind in KINDS)} |")
    return lines


def coverage(found: Sequence[Record]) -> list[str]:
    """How much of what could be asked was. A part is an entry with a type, a way and a layout."""
    asked = {part_of(record) for record in found}
    could = {part for entry in entries().values() for part in parts_of(entry, WAYS, ["all"], list(LAYOUTS))}
    could |= asked
    lines = ["## What was asked", ""]
    lines += ["A part is an entry with one type, in one way and one layout: of each, the first calls were made.", ""]
    for title, group in GROUPS.items():
        all_of, some_of = Counter(map(group, could)), Counter(map(group, asked))
        names: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for part in asked:
            names[group(part)].add(part.name)
        lines += [f"| {title} | entries | parts | of |", f"|{'---|' * (title.count('|') + 1)}--:|--:|--:|"]
        for key in sorted(all_of):
            lines.append(f"| {' | '.join(key)} | {len(names[key])} | {some_of[key]} | {all_of[key]} |")
        lines.append("")
    return lines[:-1]


GROUPS: dict[str, Callable[[Part], tuple[str, ...]]] = {
    "table | way": lambda part: (part.table, part.way),
    "way | layout": lambda part: (part.way, part.layout),
    "way | type": lambda part: (part.way, part.dtype),
}


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
