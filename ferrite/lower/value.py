"""Tensors while a graph is being lowered.

A `Box` is one storage: either pending, an expression for each element over the axes of its sizes, or in memory, a
buffer. A `Value` is one tensor of the graph: a box, seen through coordinates. A view shares its box, so it sees what is
written later; the expression of a pending box has no such memory, which is why it can be copied into its users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.ir import ONE, ZERO, Atom, Axis, Expr, Index, axis, load, never_negative, rewrite_indices, substitute
from ferrite.lower.sizes import UnknownSize

Coordinates = tuple[Index, ...]


def own_axes(sizes: Sequence[Index], name: str = "i") -> Coordinates:
    """One axis per dimension; where a size is one, or a number from data that can be nothing else, there is only zero:
    torch writes 1 for it in what is made of such a tensor."""
    return tuple(ZERO if is_one(size) else axis(f"{name}{place}", size) for place, size in enumerate(sizes))


def mapping(axes: Sequence[Index], new: Sequence[Index]) -> dict[Atom, Index]:
    return {old: index for old, index in zip(axes, new, strict=True) if isinstance(old, Axis) and old is not index}


@dataclass(eq=False)
class Box:
    """`expr` while pending, `buffer` once in memory. `strides`: where eager would put it, if that is known. `fake`:
    the fake value of the whole, from which those of its views are told. `bits_on`: where eager has a view of another
    tensor instead, with bits set (`conj_and_neg`).
    """

    sizes: Coordinates
    dtype: torch.dtype
    device: torch.device
    expr: Expr | None = None
    buffer: str | None = None
    strides: Coordinates | None = None
    origins: tuple[Any, ...] = ()
    fake: torch.Tensor | None = field(default=None, repr=False)
    bits_on: BitsOn | None = None

    def at(self, coordinates: Sequence[Index]) -> Expr:
        if self.expr is None:
            assert self.buffer is not None
            return load(self.buffer, coordinates, self.dtype)
        return rewrite_indices(self.expr, mapping(own_axes(self.sizes), coordinates))


@dataclass(frozen=True, eq=False)
class Value:
    """`coordinates` of the element in the box, over this tensor's own axes. `fake` is the fake value of it."""

    box: Box
    sizes: Coordinates
    coordinates: Coordinates
    fake: torch.Tensor | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.box.dtype

    @property
    def device(self) -> torch.device:
        return self.box.device

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def at(self, coordinates: Sequence[Index]) -> Expr:
        """The element at coordinates, one index per dimension."""
        return self.box.at(self.through(coordinates))

    def through(self, coordinates: Sequence[Index]) -> Coordinates:
        """Coordinates in the box of the element at a place."""
        new = mapping(own_axes(self.sizes), coordinates)
        return tuple(substitute(index, new) for index in self.coordinates) if new else self.coordinates

    def view(self, sizes: Sequence[Index], coordinates: Sequence[Index]) -> Value:
        """A tensor of other sizes, whose element lies at `coordinates` here, over the new tensor's axes."""
        return Value(self.box, tuple(sizes), self.through(coordinates))

    @property
    def is_whole(self) -> bool:
        """Whether this is the box itself, seen straight."""
        return self.sizes == self.box.sizes and self.coordinates == own_axes(self.sizes)


@dataclass(frozen=True, eq=False)
class BitsOn:
    """A value, and the bits (`conj`, `neg`) of a view of it by which its numbers are read as others."""

    value: Value
    bits: frozenset[str]


def whole(box: Box) -> Value:
    return Value(box, box.sizes, own_axes(box.sizes))


def broadcast_place(sizes: Sequence[Index], to: Sequence[Index]) -> tuple[Index, ...]:
    """Where the element of a smaller tensor lies, for each point of a larger shape."""
    check_broadcast(sizes, to[len(to) - len(sizes) :])
    axes = own_axes(to)[len(to) - len(sizes) :]
    return tuple(ZERO if is_one(size) else item for size, item in zip(sizes, axes, strict=True))


def check_broadcast(sizes: Sequence[Index], to: Sequence[Index]) -> None:
    """A size is one, or the size it becomes. What is neither as far as anybody knows (`s0 // 4` and `s1 // 4`) cannot
    be said in a loop: whether it is one is known only when the program runs."""
    for size, wanted in zip(sizes, to, strict=True):
        if not is_one(size) and size is not wanted and not known_equal(size, wanted):
            raise UnknownSize(f"a size {size} that becomes {wanted}")


def is_one(size: Index) -> bool:
    """Whether a size can be nothing but one. Of a number that data decides torch may know it only as a range, 1 to 1,
    which is checked where the number comes from; torch squeezes and broadcasts by it."""
    return size is ONE or (size.low == 1 and size.high == 1)


def known_equal(left: Index, right: Index) -> bool:
    """Whether two sizes are the same number, however they are written."""
    return never_negative(left - right) and never_negative(right - left)
