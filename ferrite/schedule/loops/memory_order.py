"""The axes along which memory lies side by side: loops in that order, and vectors or lanes of that axis, use every line
that is fetched whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ferrite.ir import ONE, ZERO, Axis, Index
from ferrite.machines import AnyMachine
from ferrite.schedule.fusion.accesses import UNKNOWN_EXTENT, axes_in, is_one, likely, step_of, upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import indices_at
from ferrite.schedule.loops.statements import Parts

MAX_COUNTED_ELEMENTS = 8  # of an axis: a longer one is no better a choice for vectors, on any machine that is known


def ordered_axes(axes: Sequence[Axis], indices: Sequence[Index], fixed: Axis | None = None) -> list[Axis]:
    """Axes from the slowest to the fastest in memory: by their steps in what is touched, the vector axis last."""
    best = fixed if fixed is not None else vector_axis(axes, indices)

    def reach(item: Axis) -> int:
        steps = [step for index in indices if (step := step_of(index, item)) is not None and step is not ZERO]
        return max((abs(likely(step, 1 << 30)) for step in steps), default=0)

    order = {item: place for place, item in enumerate(axes)}
    return sorted(axes, key=lambda item: (item is best, -reach(item), order[item]))


def vector_axis(axes: Sequence[Axis], indices: Sequence[Index]) -> Axis | None:
    """The axis along which most elements lie side by side; of equals the longest, then the last. One that is shorter
    than a vector counts for the part that it fills."""
    score = {item: 0 for item in axes if item.extent is not ONE}
    for index in indices:
        used = axes_in(index)
        weight = math.prod(min(likely(item.extent), UNKNOWN_EXTENT) for item in score if item in used)
        for item in used:
            if item in score and step_of(index, item) is ONE:
                score[item] += weight * min(likely(item.extent), MAX_COUNTED_ELEMENTS)
    ranked = sorted(score, key=lambda item: (score[item], min(likely(item.extent), UNKNOWN_EXTENT), axes.index(item)))
    return ranked[-1] if ranked else None


def inner_indices(nest: Nest, part: Parts) -> list[Index]:
    """The indices that change inside a row: those of what the nest does at each point over its own axes."""
    within = set(nest.axes)
    return [index for index in indices_at(tuple(part.point)) if not axes_in(index).isdisjoint(within)]


def vector_axes(
    rows: Sequence[Axis], nests: Sequence[Nest], parts: Sequence[Parts]
) -> Iterator[tuple[Nest, Parts, Axis | None]]:
    """For every nest with loops of its own: the axis, of its own or of the rows, that vectors are best made of."""
    for nest, part in zip(nests, parts, strict=True):
        if not all(is_one(item) for item in nest.axes):
            yield nest, part, vector_axis([*rows, *nest.axes], inner_indices(nest, part))


def crossing(order: Sequence[Axis], indices: Sequence[Index], machine: AnyMachine) -> Axis | None:
    """Another axis along which some memory lies side by side that does not along the vector axis, if tiles pay."""
    last = order[-1]
    for index in indices:
        for item in order[:-1]:
            if (
                goes_across(index, item, last)
                and min(upper_estimate(item.extent, 64), upper_estimate(last.extent, 64)) >= machine.min_tiled_elements
            ):
                return item
    return None


def goes_across(index: Index, across: Axis, last: Axis) -> bool:
    step = step_of(index, last)
    return step is not ONE and step is not ZERO and step_of(index, across) is ONE
