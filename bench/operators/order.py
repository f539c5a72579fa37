"""What to ask, and in which order: a sweep that is stopped at any time has asked a fair sample of everything."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tests.tables.entries import Entry, Sample, dtypes_of, entries, samples
from tests.tables.together import AT_ONCE


class Part(NamedTuple):
    """Some calls of one entry."""

    name: str
    dtype: str
    way: str
    layout: str

    @property
    def table(self) -> str:
        return self.name.split(":")[0]

    @property
    def key(self) -> str:
        return "|".join(self)


class Task(NamedTuple):
    """Parts of one way, that are compiled together."""

    way: str
    parts: tuple[Part, ...]


def parts_of(entry: Entry, ways: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str]) -> Iterator[Part]:
    """What there is to ask of an entry. Errors name their types and layouts; numbers at the edges are for functions of
    single elements alone."""
    for way in ways:
        if way == "errors" and not has_errors(entry):
            continue
        known = {str(dtype)[6:] for dtype in dtypes_of(entry, way)}
        wanted = known if "all" in dtypes or way == "errors" else known.intersection(dtypes)
        for dtype in sorted(wanted):
            for layout in ["as given"] if way == "errors" or entry.kind == "optimizer" else layouts:
                if layout != "edges" or entry.takes_edges:
                    yield Part(entry.name, dtype, way, layout)


def has_errors(entry: Entry) -> bool:
    return any(getattr(entry.info, name, None) for name in ("error_inputs_func", "module_error_inputs_func"))


def tasks_of(parts: Sequence[Part], seed: int = 0) -> list[Task]:
    """All parts, the same order for the same seed.

    Each (table, way, layout) comes by and by, as often as the root of its size: small tables are done early, and large
    ones never wait. Within it each entry comes once, with some type, before any comes again.
    """
    draw = random.Random(seed)
    groups: dict[tuple[str, str, str], dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        groups[part.table, part.way, part.layout][part.name].append(part)
    placed: dict[str, list[tuple[float, Part]]] = defaultdict(list)
    for (_, way, _), by_name in groups.items():
        turns: list[tuple[int, float, Part]] = []
        for own in by_name.values():
            draw.shuffle(own)
            turns += [(turn, draw.random(), part) for turn, part in enumerate(own)]
        turns.sort()
        step = len(turns) ** -0.5
        placed[way] += [((place + draw.random()) * step, part) for place, (_, _, part) in enumerate(turns)]
    found: list[tuple[float, Task]] = []
    for way, line in placed.items():
        line.sort()
        for start in range(0, len(line), AT_ONCE.get(way, 1)):
            some = line[start : start + AT_ONCE.get(way, 1)]
            found.append((some[0][0], Task(way, tuple(part for _, part in some))))
    return [task for _, task in sorted(found)]


def calls_of(part: Part, limit: int) -> Iterator[tuple[str, Sample]]:
    """The calls of one part by name, the same ones each time. Of other layouts than the table's the first is asked."""
    count = 1000 if part.way == "errors" else limit if part.layout == "as given" else 1
    torch.manual_seed(0)
    given: Iterator[Any] = samples(entries()[part.name], getattr(torch, part.dtype), part.way, count)
    for place, sample in enumerate(given):
        yield f"{part.key}|{place}", sample
