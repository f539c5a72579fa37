"""Where a run of kernels is better two: memory is made before a run and freed after it, so a long one may hold what
only its first kernels read beside what only its last ones write.

One more native call costs a few microseconds, so a run is split only where the whole plan holds most, and only where
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
from ferrite.schedule.memory.peak import bytes_at, bytes_by_step
from ferrite.schedule.steps import Run, Step

MAX_SPLITS = 8  # of one program: a limit on compile time


@dataclass(frozen=True)
class _Life:
    """From the first to the last launch of a run that needs a storage; beyond them where others need it too."""

    first: float
    last: float
    size: int


def with_split_runs(program: Program, steps: Sequence[Step], arenas: Arenas, fuel: Fuel) -> list[list[Step]]:
    """For each step the steps that it becomes."""
    parts: list[list[Step]] = [[step] for step in steps]
    most = bytes_by_step_of(program, parts, arenas)
    for _ in range(MAX_SPLITS):
        split = split_greatest(program, parts, most, arenas) if fuel.left else None
        if split is None:
            break
        new_parts, min_saved = split
        fewer = bytes_by_step_of(program, new_parts, arenas)
        if max(fewer) > max(most) - min_saved:
            break
        parts, most = new_parts, fewer
        fuel.spend()
    return parts


def bytes_by_step_of(program: Program, parts: Sequence[Sequence[Step]], arenas: Arenas) -> list[int]:
    steps = list(itertools.chain.from_iterable(parts))
    last_uses = last_uses_of(program, steps, arenas.buffer_table)
    return bytes_by_step(program, arenas.planned(steps), last_uses, bytes_or_zero)


def split_greatest(
    program: Program, parts: Sequence[Sequence[Step]], most: Sequence[int], arenas: Arenas
) -> tuple[list[list[Step]], int] | None:
    """The steps with the run that holds most split in two, and the bytes that this must save; None where it cannot
    help."""
    steps = list(itertools.chain.from_iterable(parts))
    at = max(range(len(most)), key=most.__getitem__)
    run = steps[at] if at < len(steps) else None
    if not isinstance(run, Run) or len(run.launches) < 2:
        return None
    buffer_table = arenas.buffer_table
    before = {buffer_table.buffers[name].storage for step in steps[:at] for name in accessed(step)}
    last_uses = set(last_uses_of(program, steps, buffer_table)[at])
    min_saved = arenas.memory_of(run).min_split
    place = best_cut(list(lives(run, before, last_uses, buffer_table)), len(run.launches), min_saved)
    if place is None:
        return None
    halves = [Run(run.launches[:place]), Run(run.launches[place:])]
    return [[new for step in part for new in (halves if step is run else [step])] for part in parts], min_saved


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
            yield _Life(first, last, bytes_or_zero(buffer_table.buffers[name]))


def best_cut(storages: Sequence[_Life], count: int, min_saved: int) -> int | None:
    """The launch before which a run of so many launches is split best; None where that saves too little."""
    unsplit = needed(storages, 0, count)
    least = max(sum(each.size for each in storages if each.first <= at <= each.last) for at in range(count))
    if unsplit - least < min_saved:
        return None
    after = {at: max(needed(storages, 0, at), needed(storages, at, count)) for at in range(1, count)}
    best = min(after, key=after.__getitem__)
    return best if unsplit - after[best] >= min_saved else None


def needed(storages: Sequence[_Life], start: int, end: int) -> int:
    """Bytes that some launches of a run need as a run of their own: tensors, and a block for what only they need."""
    own = [each for each in storages if start <= each.first and each.last < end]
    tensors = sum(each.size for each in storages if each.first < end and start <= each.last and each not in own)
    block = max(sum(each.size for each in own if each.first <= at <= each.last) for at in range(start, end))
    return tensors + block


def bytes_or_zero(buffer: Buffer) -> int:
    """Nothing, where that is known only when it runs."""
    try:
        return bytes_at(buffer, {})
    except NotScheduled:
        return 0
