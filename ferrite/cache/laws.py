"""What readers of the cache rely on: the laws of what entries say, checked before anything is made of it.

A checksum only says that an entry is as it was written, and the codec that every part is there and of its type. Here is
checked that numbers are in range and that what is named is there. An entry that breaks a law is a miss. What this
cannot know is whether object code does what it should: that is why the folder is the user's alone.

Whole columns are looked at at once, since an entry has thousands of values and a warm start has little time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ferrite.cache.codec import MAX_NUMBER, Strange
from ferrite.cache.constant_storage import KeptObject, section_of
from ferrite.codegen import RunTable
from ferrite.codegen.llvm import IMMEDIATE
from ferrite.errors import ModelLine
from ferrite.pipeline import PassRecord

MAX_SLOTS = 1 << 18  # words that a run has on the stack


class GraphEntry(Protocol):
    """See `ferrite.cache.compiled_graph`."""

    @property
    def text(self) -> str: ...
    @property
    def lines(self) -> Mapping[int, ModelLine]: ...
    @property
    def runs(self) -> tuple[RunTable, ...]: ...
    @property
    def kernels(self) -> tuple[tuple[str, tuple[str, ...]], ...]: ...
    @property
    def arguments(self) -> tuple[int | None, ...]: ...
    @property
    def objects(self) -> Mapping[str, KeptObject]: ...


def check_graph(entry: GraphEntry, sections: Mapping[str, bytes], nodes: int) -> None:
    """A compiled graph, of a captured graph of so many nodes."""
    for name, _complaints in entry.kernels:
        if name not in sections:
            raise Strange(f"there is no kernel {name}")
    if len(entry.arguments) != len(entry.kernels):
        raise Strange("there are other arguments than kernels")
    within((count for count in entry.arguments if count is not None), "arguments", 0, MAX_NUMBER)
    within(entry.lines, "lines", 0, entry.text.count("\n") + 1)
    check_runs(entry.runs, entry.arguments)
    for name, how in entry.objects.items():
        if how.place is not None:
            within(how.place[:1], "places", 0, nodes)
            within(how.place[1:], "places", 0, MAX_NUMBER)
        elif section_of(name) not in sections:
            raise Strange(f"there is no constant {name}")


def check_runs(runs: Sequence[RunTable], counts: Sequence[int | None]) -> None:
    """Tables of kernels: all of them at once, since most are short. `counts`: how many arguments each kernel has."""
    within((run.arena for run in runs), "arenas", 0, MAX_NUMBER)
    within((run.slots for run in runs), "slots", 0, MAX_SLOTS)
    calls = [call for run in runs for call in run.calls]
    within((call.kernel for call in calls), "kernels", 0, len(counts))
    pairs = [pair for call in calls for pair in call.arguments]
    within((slot for slot, _offset in pairs), "slots", IMMEDIATE, MAX_SLOTS)
    if [1 for call in calls if len(call.arguments) != counts[call.kernel]]:
        raise Strange("kernels have other arguments")
    if [1 for slot, offset in pairs if offset < 0 <= slot]:
        raise Strange("an argument lies before its memory")
    for run in runs:
        within((slot for call in run.calls for slot, _offset in call.arguments), "slots", IMMEDIATE, run.slots)
        check_regions(run)
        if run.arena_parts:
            within((part.offset for part in run.arena_parts), "offsets", 0, run.arena + 1)
            within((part.size for part in run.arena_parts), "sizes", 0, run.arena + 1)
            within(
                (place for part in run.arena_parts for place in (part.first, part.last)), "places", 0, len(run.calls)
            )


def check_regions(run: RunTable) -> None:
    done = 0
    for region in run.parallel_regions:
        within([region.threads], "threads", 1, 1 << 31)
        if region.first < done or region.count < 1 or region.first + region.count > len(run.calls):
            raise Strange("regions lie behind each other, inside their run")
        done = region.first + region.count


def check_passes(passes: Sequence[PassRecord]) -> None:
    """What passes did to a graph."""
    within((each.nodes_before for each in passes), "nodes", 0, MAX_NUMBER)
    within((each.nodes_after for each in passes), "nodes", 0, MAX_NUMBER)
    within((count for each in passes for count in each.rewrites.values()), "rewrites", 0, MAX_NUMBER)


def check_rows(nodes: Any) -> None:
    """What passes made of a graph: places of nodes, and rows, which are checked where they are followed
    (`ferrite.capture.edits`)."""
    if nodes is not None and (type(nodes) is not list or not {int, dict}.issuperset(map(type, nodes))):
        raise Strange("nodes are places or rows")


def within(numbers: Iterable[int], what: str, low: int, high: int) -> None:
    """Whole numbers from `low` up to, but not, `high`."""
    found = list(numbers)
    if found and not low <= min(found) <= max(found) < high:
        raise Strange(f"{what} are out of range")
