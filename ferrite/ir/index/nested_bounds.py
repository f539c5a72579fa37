"""Bounds of places in nested loops, where an inner loop ends by what an outer one has left.

    for i in parallel((n + 4095) // 4096):
        for j in vector(min(n - 4096*i, 4096)):
            out[4096*i + j]

`n - 1 - 4096*i - j` is never negative. `never_negative` puts every axis at its end at once, and finds -4095; taken from
the inside out, j first, it is `n - 4096*i - min(n - 4096*i, 4096)`, and of two numbers neither is below the lesser.
It costs more, so it is for the laws of kernels alone, and for the few places where the short proof ends.
"""

from __future__ import annotations

from ferrite.ir.index.algebra import (
    Axis,
    Index,
    Max,
    Min,
    Sum,
    add,
    multiply,
    never_negative,
    number,
    parts_of,
    product,
)

MAX_PROOF_STEPS = 64  # of one proof, all branches together


def never_negative_in_loops(index: Index) -> bool:
    """Whether an index is zero or more in every iteration of the loops that its axes are of."""
    return never_negative(index) or _Proof().found(index)


def inside_in_loops(index: Index, size: Index) -> bool:
    """Whether an index is one of a dimension's, of this size or of the largest that it may have."""
    ends = (size - 1 - index, number(size.high or 0) - 1 - index)
    return never_negative_in_loops(index) and any(map(never_negative_in_loops, ends))


class _Proof:
    def __init__(self) -> None:
        self.left = MAX_PROOF_STEPS

    def found(self, index: Index) -> bool:
        self.left -= 1
        if self.left < 0:
            return False
        if never_negative(index):
            return True
        return self.by_axis(index) or self.by_cases(index)

    def by_cases(self, index: Index) -> bool:
        """A minimum or maximum is what it chooses from: first the one with most inside, which may take others away."""
        choices = [(item, factor) for item, factor in terms_of(index) if isinstance(item, Min | Max)]
        if not choices:
            return False
        item, factor = max(choices, key=lambda term: len(term[0].text))
        cases = (
            add([(index, 1), (item, -factor), (chosen, factor)])
            for chosen in sorted(item.items, key=lambda chosen: chosen.high is None)
        )
        # Whichever is least is added: all have to do. It is taken off: no more than any is.
        some = all if isinstance(item, Min) == (factor > 0) else any
        return some(map(self.found, cases))

    def by_axis(self, index: Index) -> bool:
        """The innermost axis is where it makes the index smallest, and those around it are as they were."""
        inside = [atom for item, _ in terms_of(index) for atom in parts_of(item) if isinstance(atom, Axis)]
        if not inside:
            return False
        inner = max(inside, key=_depth)
        parts: list[tuple[Index, int]] = [(index, 1)]
        for item, factor in terms_of(index):
            others = list(parts_of(item))
            if inner not in others:
                if inner in item.atoms:
                    return False
                continue
            others.remove(inner)
            if inner in others or any(part.low is None or part.low < 0 for part in others):
                return False
            parts.append((item, -factor))
            if factor < 0:
                parts.append((multiply(product(others), inner.extent - 1), factor))
        return self.found(add(parts))


def terms_of(index: Index) -> tuple[tuple[Index, int], ...]:
    return index.terms if isinstance(index, Sum) else ((index, 1),)


def _depth(axis: Axis) -> int:
    """How many loops around decide how often this one runs, one around the other."""
    return 1 + max((_depth(atom) for atom in axis.extent.atoms if isinstance(atom, Axis)), default=0)
