"""Two reports held against each other: versions, machine, options, passes, kernels, calls, memory, times.

Compilations are paired by the line of the model that they begin at, and graphs by their kind, in order.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrite.errors import UserError
from ferrite.reports.data import FORMAT, VERSION
from ferrite.reports.page import BEGIN, END

Data = Mapping[str, Any]
MIN_COMPILE_SECONDS = 0.05  # what is shorter is not held against each other: clocks and other programs decide
MIN_STEP_SECONDS = 20e-6


@dataclass(frozen=True)
class Change:
    """`where`: the graph or compilation, empty for the whole. A side that has nothing is empty."""

    section: str
    where: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        about = f"{self.where}: {self.what}" if self.where else self.what
        if not self.after:
            return f"{about}: gone" + (f" (was {self.before})" if self.before != "there" else "")
        if not self.before:
            return f"{about}: new" + (f" ({self.after})" if self.after != "there" else "")
        return f"{about}: {self.before} -> {self.after}"


def read_record(path: Path) -> dict[str, Any]:
    """The record in a page, or a record by itself."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read the report {path}", {"because": str(problem)}) from None
    if BEGIN in text:
        text = text.partition(BEGIN)[2].partition(END)[0]
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{path} is no report", {"expected": "a page or a record that ferrite.report wrote"})
    if not isinstance(found.get("version"), int) or found["version"] > VERSION:
        raise UserError(
            f"{path} is of version {found.get('version')}, and here {VERSION} is known",
            {"to change that": "use the ferrite that wrote it, or a newer one"},
        )
    return found


def compare(before: Data, after: Data, tolerance: float) -> list[Change]:
    """`tolerance`: times that differ by no more than this part of the first are the same."""
    found = [*mappings("versions", "", before["versions"], after["versions"])]
    found += mappings("machine", "", before["machine"], after["machine"])
    reasons = [Counter(each["reason"] for each in side["breaks"]) for side in (before, after)]
    found += counts("graph breaks", "", "", *reasons)
    for title, one, other in paired(before["compiles"], after["compiles"], "title"):
        if one is None or other is None:
            found.append(Change("compilations", "", title, there(one), there(other)))
            continue
        found += compilations(title, one, other, tolerance)
    return found


def there(side: object) -> str:
    return "" if side is None else "there"


def paired(before: Sequence[Data], after: Sequence[Data], key: str) -> Iterator[tuple[str, Data | None, Data | None]]:
    """The first of a name with the first of that name, and so on; None where one side has fewer."""
    names = dict.fromkeys(each[key] for each in (*before, *after))
    for name in names:
        sides = ([each for each in side if each[key] == name] for side in (before, after))
        for one, other in itertools.zip_longest(*sides):
            yield name, one, other


def compilations(title: str, before: Data, after: Data, tolerance: float) -> Iterator[Change]:
    ignored = {"report", "measure", "dump_dir", "cache_dir", "repro_dir"}  # none of them changes what is compiled
    sides = (
        {name: value for name, value in side["options"].items() if name not in ignored} for side in (before, after)
    )
    yield from mappings("options", title, *sides)
    if before["recompiled"] != after["recompiled"]:
        yield Change("recompilations", title, "because", before["recompiled"] or "", after["recompiled"] or "")
    yield from compile_times(title, before, after, tolerance)
    for kind, one, other in paired(before["graphs"], after["graphs"], "kind"):
        if one is None or other is None:
            yield Change("graphs", title, kind, there(one), there(other))
            continue
        yield from graphs(f"{title}, {kind}", one, other, tolerance)


def graphs(where: str, before: Data, after: Data, tolerance: float) -> Iterator[Change]:
    if before["failure"] != after["failure"]:
        yield Change("graphs", where, "failure", before["failure"] or "", after["failure"] or "")
    yield from counts("passes", where, "", *map(rewrites, (before, after)))
    skipped = ({each["name"]: each["note"] for each in side["passes"] if each["note"]} for side in (before, after))
    yield from mappings("passes", where, *skipped)
    yield from counts("kernels", where, "kernel ", *(titles(side, "kernel") for side in (before, after)))
    yield from code(where, before, after)
    yield from counts("calls of torch", where, "", *(titles(side, "call", "template") for side in (before, after)))
    reasons = (Counter(each["reason"] for each in side["not_fused"]) for side in (before, after))
    yield from counts("not fused", where, "", *reasons)
    for name in ("peak", "eager"):
        one, other = ((side["memory"] or {}).get(name) for side in (before, after))
        if one != other:
            yield Change("memory", where, f"{name} bytes", number(one), number(other))
    yield from step_times(where, before, after, tolerance)


def rewrites(graph: Data) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in graph["passes"]:
        total.update({f"{each['name']}, rule {rule}": count for rule, count in each["rewrites"].items()})
    return total


def titles(graph: Data, *kinds: str) -> Counter[str]:
    return Counter(step["title"] for step in graph["steps"] if step["kind"] in kinds)


def code(where: str, before: Data, after: Data) -> Iterator[Change]:
    """Kernels of one name that are other kernels."""
    sides = ({each["name"]: each["digest"] for each in side["kernels"]} for side in (before, after))
    one, other = sides
    for name in one:
        if name in other and one[name] != other[name]:
            yield Change("kernels", where, f"kernel {name} as scheduled", one[name], other[name])


# --- times ------------------------------------------------------------------------------------------------------------


def compile_times(title: str, before: Data, after: Data, tolerance: float) -> Iterator[Change]:
    sides = [{**side["stages"], "all stages": sum(side["stages"].values())} for side in (before, after)]
    for name in sides[1]:
        one, other = sides[0].get(name), sides[1][name]
        if one is not None and differ(one, other, tolerance, MIN_COMPILE_SECONDS):
            yield Change("compile time", title, name, seconds(one), seconds(other))


def step_times(where: str, before: Data, after: Data, tolerance: float) -> Iterator[Change]:
    one, other = (dict(times_by_title(side)) for side in (before, after))
    totals = sum(one.values()), sum(other.values())
    if one and other and differ(*totals, tolerance, MIN_STEP_SECONDS):
        yield Change("run time", where, "all steps", seconds(totals[0]), seconds(totals[1]))
    for name in one:
        if name in other and differ(one[name], other[name], tolerance, MIN_STEP_SECONDS):
            yield Change("run time", where, name, seconds(one[name]), seconds(other[name]))


def times_by_title(graph: Data) -> Iterator[tuple[str, float]]:
    found: Counter[str] = Counter()
    for step in graph["steps"]:
        if step["seconds"] is not None:
            found[step["title"]] += step["seconds"]
    yield from found.items()


def differ(before: float, after: float, tolerance: float, least: float) -> bool:
    return abs(after - before) > max(tolerance * before, least)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


# --- pieces -----------------------------------------------------------------------------------------------------------


def mappings(section: str, where: str, before: Data, after: Data) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Change(section, where, name, shown(before.get(name)), shown(after.get(name)))


def shown(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def counts(section: str, where: str, prefix: str, before: Counter[str], after: Counter[str]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        if before[name] != after[name]:
            sides = (occurrences(side[name]) for side in (before, after))
            yield Change(section, where, f"{prefix}{name}", *sides)


def occurrences(count: int) -> str:
    return "" if not count else "once" if count == 1 else f"{count} times"


# --- as text and as a page --------------------------------------------------------------------------------------------


def by_section(changes: Sequence[Change]) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for each in changes:
        found.setdefault(each.section, []).append(each)
    return found


def as_text(changes: Sequence[Change]) -> str:
    if not changes:
        return "no difference"
    rows = []
    for section, members in by_section(changes).items():
        rows += [section, *(f"  {each}" for each in members)]
    return "\n".join(rows)
