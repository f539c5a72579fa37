"""Passes of a graph: what each changed, and where rules had a candidate and did not fire."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ferrite.debug import GraphDetails
from ferrite.pipeline import PassRecord
from ferrite.reports.data import Hunk, NearMiss, Pass
from ferrite.reports.sources import SourceLines

MAX_NODES = 8  # that are named of a near miss
CAPTURED = "captured"


def pass_data(stage: str, record: PassRecord, hunks: tuple[Hunk, ...] | None = None) -> Pass:
    return Pass(
        stage,
        record.name,
        record.seconds,
        dict(record.rewrites),
        record.nodes_before,
        record.nodes_after,
        record.note,
        dict(record.facts),
        hunks,
    )


def passes_of(details: GraphDetails) -> tuple[tuple[int, ...], tuple[Pass, ...], tuple[int, ...]]:
    """The graph as it came, what passes changed, and the graph as they left it: numbers of rows."""
    first: tuple[int, ...] | None = None
    now: tuple[int, ...] = ()
    found = []
    for step in details.steps:
        if first is None:
            first = now = step.rows or ()
        before, now = now, now if step.rows is None else step.rows
        if step.record is not None:
            found.append(pass_data(step.stage, step.record, tuple(hunks_between(before, now))))
        elif before != now:  # between two stages
            hunks = tuple(hunks_between(before, now))
            found.append(Pass(step.stage, CAPTURED, 0.0, {}, len(before), len(now), "", {}, hunks))
    return first or (), tuple(found), now


def with_skipped(records: Sequence[PassRecord], ran: Sequence[Pass]) -> tuple[Pass, ...]:
    """All passes in order, those too that did not run, with what the others changed."""
    found: list[Pass] = []
    left = list(ran)
    for record in records:
        if not left or (record.name, record.seconds) != (left[0].name, left[0].seconds):
            found.append(pass_data(left[0].stage if left else found[-1].stage if found else "", record, ()))
            continue
        found.append(left.pop(0))
        while left and left[0].name == CAPTURED:
            found.append(left.pop(0))
    return (*found, *left)


def hunks_between(before: Sequence[int], after: Sequence[int]) -> list[Hunk]:
    """What makes one list of the other; no number is in one of them twice.

    >>> hunks_between([1, 2, 3, 4], [1, 5, 3, 4, 6])
    [Hunk(at=1, removed=1, added=(5,)), Hunk(at=4, removed=0, added=(6,))]
    """
    if before == after:
        return []
    places = {number: place for place, number in enumerate(before)}
    kept = set(longest_rising([places[number] for number in after if number in places]))
    found: list[Hunk] = []
    place, added = 0, list[int]()
    for number in (*after, None):
        at = len(before) if number is None else places.get(number, -1)
        if number is not None and at not in kept:
            added.append(number)
            continue
        if added or at > place:
            found.append(Hunk(place, at - place, tuple(added)))
            added = []
        place = at + 1
    return found


def longest_rising(numbers: Sequence[int]) -> list[int]:
    """The longest part of a list, in order, whose numbers rise.

    >>> longest_rising([3, 1, 2, 5, 4])
    [1, 2, 4]
    """
    tails: list[int] = []  # the least last number of a rising part of each length
    ends: list[int] = []  # and where it stands
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect.bisect_left(tails, number)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [number]
        ends[length : length + 1] = [place]
    found = []
    place = ends[-1] if ends else -1
    while place >= 0:
        found.append(numbers[place])
        place = before[place]
    return found[::-1]


def near_misses(details: GraphDetails, places: SourceLines) -> tuple[NearMiss, ...]:
    """One for each rule and reason, most frequent first."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for each in details.refusals.values():
        groups.setdefault((each.rule, each.reason), []).append((each.node, places.of(each.line)))
    found = [
        NearMiss(
            rule,
            reason,
            len(members),
            tuple(node for node, _ in members[:MAX_NODES]),
            tuple(dict.fromkeys(place for _, place in members if place >= 0))[:MAX_NODES],
        )
        for (rule, reason), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.count, each.rule)))
