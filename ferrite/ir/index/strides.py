"""Where elements lie: in the order of their coordinates, the last one fastest; and whether strides put two at one
place."""

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


def may_overlap(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether two elements of a tensor, given as (size, stride) of each dimension, may share memory. (2, 3), (3, 1) has
    six elements at six places; (2, 1), (3, 1) has two at place 1. What a stride of 0 repeats is one element here."""
    reach = 0  # the greatest distance of two elements along the dimensions seen so far, whose strides are smaller
    for stride, size in sorted((stride, size) for size, stride in dims if stride and size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
