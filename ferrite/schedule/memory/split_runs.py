"""Where a run of kernels is better two: memory is made before a run and freed after it, so a long one may hold what
only its first kernels read beside what only its last ones write.

One more native call costs a few microseconds, so a run is parted only where the whole plan holds most, and only where
that saves enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ferrite.errors import NotScheduled
from ferrite.ir.program import Buffer, Program
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.memory.arena import Arenas
from ferrite.schedule.memory.liveness import accessed, last_uses_of
from ferrite.schedule.memory.peak import bytes_at, held
from ferrite.schedule.steps import Run, Step

WORTH = 1 << 16  # bytes saved, for which a run is parted
MOST_PARTED = 8


@dataclass(frozen=True)
class _Life:
    """From the first to the last launch of a run that needs a storage; beyond them where others need it too."""

    first: float
    last: float
    size: int


def with_parted_runs(program: Program, steps: Sequence[Step], arenas: Arenas, fuel: Fuel) -> list[list[Step]]:
    """For each step the steps that it becomes."""
    parts: list[list[Step]] = [[step] for step in steps]
    most = bytes_held(program, parts, arenas)
    for _ in range(MOST_PARTED):
        found = greatest_parted(program, parts, most, arenas) if fuel.left else None
        if found is None:
            break
        fewer = bytes_held(program, found, arenas)
        if max(fewer) > max(most) - WORTH:
            break
        parts, most = found, fewer
        fuel.spend()
    return parts


def bytes_held(program: Program, parts: Sequence[Sequence[Step]], arenas: Arenas) -> list[int]:
    steps = list(itertools.chain.from_iterable(parts))
    last_uses = last_uses_of(program, steps, arenas.buffer_table)
    return held(program, arenas.planned(steps), last_uses, known_bytes)


def greatest_parted(
    program: Program, parts: Sequence[Sequence[Step]], most: Sequence[int], arenas: Arenas
) -> list[list[Step]] | None:
    """The steps with the run parted that holds most, if that may help."""
    steps = list(itertools.chain.from_iterable(parts))
    at = max(range(len(most)), key=most.__getitem__)
    run = steps[at] if at < len(steps) else None
    if not isinstance(run, Run) or len(run.launches) < 2:
        return None
    buffer_table = arenas.buffer_table
    before = {buffer_table.buffers[name].storage for step in steps[:at] for name in accessed(step, buffer_table)}
    last_uses = set(last_uses_of(program, steps, buffer_table)[at])
    place = best_cut(list(lives(run, before, last_uses, buffer_table)), len(run.launches))
    if place is None:
        return None
    halves = [Run(run.launches[:place]), Run(run.launches[place:])]
    return [[new for step in part for new in (halves if step is run else [step])] for part in parts]


def lives(run: Run, before: set[str], last_uses: set[str], buffer_table: BufferTable) -> Iterator[_Life]:
    places: dict[str, list[int]] = {}
    for place, launch in enumerate(run.launches):
        for name in launch.arguments:
            places.setdefault(name, []).append(place)
    for name, found in places.items():
        kind = buffer_table.buffers[name].kind
        if kind in ("owned", "donated"):
            first = float("-inf") if name in before or kind == "donated" else found[0]
            last = found[-1] if name in last_uses else float("inf")
            yield _Life(first, last, known_bytes(buffer_table.buffers[name]))


def best_cut(found: Sequence[_Life], count: int) -> int | None:
    """The launch before which a run is parted best; None where that saves too little."""
    whole = needed(found, 0, count)
    if whole - max(sum(each.size for each in found if each.first <= at <= each.last) for at in range(count)) < WORTH:
        return None
    after = {at: max(needed(found, 0, at), needed(found, at, count)) for at in range(1, count)}
    best = min(after, key=after.__getitem__)
    return best if whole - after[best] >= WORTH else None


def needed(found: Sequence[_Life], start: int, end: int) -> int:
    """Bytes that some launches of a run need as a run of their own: tensors, and a block for what only they need."""
    own = [each for each in found if start <= each.first and each.last < end]
    tensors = sum(each.size for each in found if each.first < end and start <= each.last and each not in own)
    block = max(sum(each.size for each in own if each.first <= at <= each.last) for at in range(start, end))
    return tensors + block


def known_bytes(buffer: Buffer) -> int:
    """Nothing, where that is known only when it runs."""
    try:
        return bytes_at(buffer, {})
    except NotScheduled:
        return 0
