"""What readers of the cache rely on: the laws of what entries say, checked before anything is made of it.

A checksum only says that an entry is as it was written. Here is checked that the data has every part, of the right
types, that numbers are in range and that what is named is there. An entry that breaks a law is a miss. What this
cannot know is whether object code does what it should: that is why the folder is the user's alone.

Whole columns are looked at at once, since an entry has thousands of values and a warm start has little time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ferrite.cache.entry import Damaged
from ferrite.codegen.llvm import IMMEDIATE

MAX_NUMBER = 1 << 62  # of any number
MAX_SLOTS = 1 << 18  # words that a run has on the stack
DATA = (bool, int, float, str)
Law = Callable[[Any], None]


class Strange(Damaged):
    """The law that an entry breaks."""


# --- kinds of entries -------------------------------------------------------------------------------------------------


def check_graph(data: Mapping[str, Any], sections: Mapping[str, bytes], nodes: int) -> None:
    """A compiled graph, of a captured graph of so many nodes."""
    source, kernels, arguments, record, objects = fields(data, "source", "kernels", "arguments", "record", "objects")
    for row in rows(kernels, 2, "kernels"):
        texts([row[0]], "names of kernels")
        texts(row[1], "complaints")
        if row[0] not in sections:
            raise Strange(f"there is no kernel {row[0]}")
    wholes_or_none(arguments, "arguments", MAX_NUMBER)
    if len(arguments) != len(kernels):
        raise Strange("there are other arguments than kernels")
    check_source(source, arguments, nodes)
    check_record(record, nodes)
    for name, how in names(objects, dict, "objects").items():
        if "place" in how:
            number, _leaf = wholes(how["place"], "places", 0, MAX_NUMBER)
            wholes([number], "places", 0, nodes)
        elif f"object {name}" not in sections:
            raise Strange(f"there is no constant {name}")


def check_rewritten(data: Mapping[str, Any]) -> None:
    """What passes made of a graph. Its rows are checked where they are followed (`ferrite.capture.edits`)."""
    nodes, passes = fields(data, "nodes", "passes")
    if nodes is not None and (type(nodes) is not list or not {int, dict}.issuperset(map(type, nodes))):
        raise Strange("nodes are places or rows")
    check_passes(passes)


# --- parts ------------------------------------------------------------------------------------------------------------


def check_source(data: Any, counts: Sequence[int | None], nodes: int) -> None:
    """`counts`: how many arguments each kernel has."""
    parts = ("function", "text", "lines", "operators", "runs", "programs", "scalars")
    function, text, lines, operators, runs, programs, scalars = fields(data, *parts)
    texts([function, text], "the host program")
    number_of_rows = text.count("\n") + 1
    at, places = columns(lines, 2, "lines")
    wholes(at, "lines", 0, number_of_rows)
    wholes(places, "lines", 0, nodes)
    names(operators, str, "operators")
    texts(programs, "programs")
    texts(scalars, "scalars")
    check_runs(runs, counts)


def check_runs(runs: Any, counts: Sequence[int | None]) -> None:
    """Tables of kernels: all of them at once, since most are short."""
    arenas, slots, calls, together, devices = columns(runs, 5, "runs")
    texts(devices, "devices")
    wholes(arenas, "arenas", 0, MAX_NUMBER)
    wholes(slots, "slots", 0, MAX_SLOTS)
    called, arguments, complaints = columns(flat(calls, "calls"), 3, "calls")
    wholes(called, "kernels", 0, len(counts))
    texts(flat(complaints, "complaints"), "complaints")
    pairs = flat(arguments, "arguments")
    from_slots, offsets = columns(pairs, 2, "arguments")
    wholes(from_slots, "slots", IMMEDIATE, MAX_SLOTS)
    wholes(offsets, "offsets", -MAX_NUMBER, MAX_NUMBER)
    if list(map(len, arguments)) != [counts[each] for each in called]:
        raise Strange("kernels have other arguments")
    if [1 for slot, offset in pairs if offset < 0 <= slot]:
        raise Strange("an argument lies before its memory")
    for most, some, regions in zip(slots, calls, together, strict=True):
        if max([slot for _kernel, given, _complaints in some for slot, _offset in given], default=IMMEDIATE) >= most:
            raise Strange("slots are out of range")
        if regions != []:
            check_regions(regions, len(some))


def check_regions(regions: Any, calls: int) -> None:
    done = 0
    for first, count, threads in rows(regions, 3, "regions"):
        wholes([first, count], "regions", 0, calls + 1)
        wholes([threads], "threads", 1, 1 << 31)
        if first < done or count < 1 or first + count > calls:
            raise Strange("regions lie behind each other, inside their run")
        done = first + count


def check_record(data: Any, nodes: int) -> None:
    parts = ("operators", "inputs", "kernels", "eager", "memory", "not fused", "passes")
    operators, inputs, kernels, eager, memory, not_fused, passes = fields(data, *parts)
    wholes([operators], "operators", 0, MAX_NUMBER)
    texts(inputs, "inputs")
    kernel_names, nodes_of, places, regions = columns(kernels, 4, "kernels")
    texts(kernel_names, "kernels")
    each(nodes_of, lambda value: texts(value, "nodes"))
    each(places, lambda value: wholes_or_none(value, "places", nodes))
    wholes_or_none(regions, "regions", MAX_NUMBER)
    called, reasons, lines = columns(eager, 3, "eager calls")
    texts([*called, *reasons], "eager calls")
    wholes_or_none(lines, "lines", nodes)
    if memory is not None:
        rows([memory], 2, "memory")
        wholes_or_none(memory, "memory", MAX_NUMBER)
    for some, group, reason in rows(not_fused, 3, "not fused"):
        texts(some, "nodes")
        texts(group, "nodes")
        texts([reason], "reasons")
    check_passes(passes)


def check_passes(data: Any) -> None:
    called, rewrites, before, after, notes, facts = columns(data, 6, "passes")
    texts([*called, *notes], "passes")
    wholes([*before, *after], "nodes", 0, MAX_NUMBER)
    if not {dict}.issuperset(map(type, [*rewrites, *facts])):
        raise Strange("rewrites and facts are not by name")
    wholes(list(chain.from_iterable(map(dict.values, rewrites))), "rewrites", 0, MAX_NUMBER)
    plain(chain.from_iterable(map(dict.values, facts)), "facts")


# --- data -------------------------------------------------------------------------------------------------------------


def fields(data: Any, *wanted: str) -> list[Any]:
    if type(data) is not dict:
        raise Strange(f"{', '.join(wanted)} are not by name")
    missing = [name for name in wanted if name not in data]
    if missing:
        raise Strange(f"there is no {missing[0]}")
    return [data[name] for name in wanted]


def rows(data: Any, width: int, what: str) -> Sequence[Any]:
    if type(data) is not list or not {list}.issuperset(map(type, data)) or not {width}.issuperset(map(len, data)):
        raise Strange(f"{what} are not rows of {width}")
    return data


def columns(data: Any, width: int, what: str) -> list[list[Any]]:
    found = rows(data, width, what)
    return list(map(list, zip(*found, strict=True))) if found else [[] for _ in range(width)]


def flat(data: Sequence[Any], what: str) -> list[Any]:
    """What lists in a list hold."""
    if not {list}.issuperset(map(type, data)):
        raise Strange(f"{what} are not lists")
    return list(chain.from_iterable(data))


def each(data: Iterable[Any], law: Law) -> None:
    for value in data:
        law(value)


def names(data: Any, kind: type, what: str) -> Mapping[str, Any]:
    """Values of a kind by name; names are strings in all JSON."""
    if type(data) is not dict or not {kind}.issuperset(map(type, data.values())):
        raise Strange(f"{what} are not {kind.__name__} by name")
    return data


def texts(data: Any, what: str) -> None:
    if type(data) is not list or not {str}.issuperset(map(type, data)):
        raise Strange(f"{what} are not texts")


def wholes(data: Any, what: str, low: int, high: int) -> Sequence[int]:
    """Whole numbers from `low` up to, but not, `high`."""
    if type(data) is not list or not {int}.issuperset(map(type, data)):
        raise Strange(f"{what} are not whole numbers")
    if data and not low <= min(data) <= max(data) < high:
        raise Strange(f"{what} are out of range")
    return data


def wholes_or_none(data: Any, what: str, high: int) -> None:
    if type(data) is not list:
        raise Strange(f"{what} are not a list")
    wholes([value for value in data if value is not None], what, 0, high)


def plain(data: Iterable[Any], what: str) -> None:
    for value in data:
        if type(value) not in DATA or (type(value) is float and not math.isfinite(value)):
            raise Strange(f"{what} are not numbers or words")
