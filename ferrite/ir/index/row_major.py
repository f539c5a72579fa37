"""Places, sizes and strides of elements that lie in the order of their coordinates, the last one fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferrite.ir.index.algebra import ONE, ZERO, Index


def flat_place(coordinates: Sequence[Index], sizes: Sequence[Index]) -> Index:
    """Where an element lies: (i, j) of (4, 8) at 8*i + j."""
    place: Index = ZERO
    for coordinate, size in zip(coordinates, sizes, strict=True):
        place = place * size + coordinate
    return place


def flat_extent(sizes: Iterable[Index]) -> Index:
    """How many elements there are."""
    total: Index = ONE
    for size in sizes:
        total = total * size
    return total


def contiguous_strides(sizes: Sequence[Index]) -> tuple[Index, ...]:
    """(4, 8) has (8, 1); an empty dimension counts as one, as in torch."""
    strides: list[Index] = []
    step: Index = ONE
    for size in reversed(sizes):
        strides.append(step)
        step = step * (ONE if size is ZERO else size)
    return tuple(reversed(strides))
