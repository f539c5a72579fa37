"""Which bytes of a piece of memory are accessed, and when last.

Views of one buffer that do not overlap do not disturb each other. Comparing each view with each other would be
quadratic: `LastAccess` is a tree over the ends of all spans and answers in logarithmic time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MAX_ADDRESS = 1 << 63  # beyond any address


@dataclass(frozen=True)
class Span:
    """The bytes from `low` up to, and without, `high`."""

    low: int
    high: int

    def overlaps(self, other: Span) -> bool:
        return max(self.low, other.low) < min(self.high, other.high)

    def shifted(self, by: int) -> Span:
        return self if self == EVERYTHING else Span(self.low + by, self.high + by)


EVERYTHING = Span(-MAX_ADDRESS, MAX_ADDRESS)


def span_of(value: object) -> Span:
    """The bytes that a tensor lies in, from its first element to its last; everything where that is not known."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return EVERYTHING
    if any(type(size) is int and size == 0 for size in value.shape):  # nothing is asked of symbols: that adds guards
        return Span(0, 0)
    first = value.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if not isinstance(first, int) or not isinstance(last, int):
        return EVERYTHING
    return Span(first * value.element_size(), (last + 1) * value.element_size())


class LastAccess:
    """For any bytes the last position at which one of them is accessed."""

    def __init__(self, positions: Sequence[int], spans: Sequence[Span]) -> None:
        self.ends = sorted({end for span in spans for end in (span.low, span.high)})
        # The leaves of the tree are the pieces between neighbouring ends; block i has the halves 2i and 2i + 1.
        self.leaves = 1 << max(0, len(self.ends) - 1).bit_length()
        self.whole = [-1] * (2 * self.leaves)  # the last access to all of a block
        self.part = [-1] * (2 * self.leaves)  # the last access to any of it
        for position, span in zip(positions, spans, strict=True):
            for block in self.blocks(span):
                self.whole[block] = max(self.whole[block], position)
                for above in upwards(block):
                    self.part[above] = max(self.part[above], position)

    def of(self, span: Span) -> int:
        """The position, or -1 where nothing accesses any of it."""
        found = -1
        for block in self.blocks(span):
            found = max(found, self.part[block], *(self.whole[above] for above in upwards(block)))
        return found

    def blocks(self, span: Span) -> Iterator[int]:
        """The fewest blocks that make up all pieces that a span touches."""
        if span.low >= span.high:
            return
        low = max(0, bisect.bisect_right(self.ends, span.low) - 1) + self.leaves
        high = bisect.bisect_left(self.ends, span.high) + self.leaves
        while low < high:
            if low & 1:
                yield low
                low += 1
            if high & 1:
                high -= 1
                yield high
            low, high = low // 2, high // 2


def upwards(block: int) -> Iterator[int]:
    while block:
        yield block
        block //= 2


class Accesses:
    """Where in a graph a piece of memory is accessed, in order, and which bytes of it."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.spans: list[Span] = []
        self._last: LastAccess | None = None

    def add(self, position: int, span: Span) -> None:
        self.positions.append(position)
        self.spans.append(span)

    def after(self, position: int, span: Span) -> bool:
        """Whether any of some bytes is accessed behind a position."""
        if self.positions[-1] <= position:
            return False
        if self._last is None:
            self._last = LastAccess(self.positions, self.spans)
        return self._last.of(span) > position
