"""Strides of views in the memory of their base, where elements lie so regularly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ferrite.graph import storages_in
from ferrite.ir import ONE, ZERO, Axis, Index, Product, Sum, Symbol, add, product
from ferrite.ir.program import Buffer
from ferrite.lower.sizes import Sizes
from ferrite.lower.value import Value, own_axes

Strided = tuple[tuple[Index, ...], Index]


class HasSizes(Protocol):
    sizes: Sizes
    bound: set[Symbol]


def by_coordinates(buffer: Buffer, value: Value) -> Strided | None:
    """Strides and offset of a value in the storage of its box, from its coordinates there."""
    flat: Index = buffer.offset
    for index, stride in zip(value.coordinates, buffer.strides, strict=True):
        flat = flat + index * stride
    axes = own_axes(value.sizes)
    strides: list[Index] = []
    for item in axes:
        if not isinstance(item, Axis):
            strides.append(ZERO)
            continue
        step = coefficient(flat, item)
        if step is None:
            return None
        strides.append(step)
    offset = flat
    for item, step in zip(axes, strides, strict=True):
        offset = offset - item * step
    return (tuple(strides), offset) if not any(isinstance(atom, Axis) for atom in offset.atoms) else None


def by_torch(ctx: HasSizes, buffer: Buffer, value: Value, fake: torch.Tensor | None) -> Strided | None:
    """The same, read off the fake values of the value and of its box. Torch knows more of symbolic sizes than can be
    told from coordinates: that s // (s // 2) is two, for example, and a view of that size therefore no copy."""
    base = value.box.fake
    if fake is None or base is None or fake.layout is not torch.strided or fake.dtype != base.dtype:
        return None
    if storages_in(fake) != storages_in(base) or ctx.sizes.indices(base.stride()) != buffer.strides:
        return None
    away = ctx.sizes.index(fake.storage_offset()) - ctx.sizes.index(base.storage_offset())
    strides = ctx.sizes.indices(fake.stride())
    # where data decides the start of a part, torch has a name for it of which nothing at run time knows the number
    if any(isinstance(atom, Symbol) and atom not in ctx.bound for each in (away, *strides) for atom in each.atoms):
        return None
    return strides, buffer.offset + away


def coefficient(flat: Index, loop_axis: Axis) -> Index | None:
    """The factor of an axis in a sum where it stands alone; None where it stands inside something else."""
    if loop_axis not in flat.atoms:
        return ZERO
    parts: list[tuple[Index, int]] = []
    for term, factor in flat.terms if isinstance(flat, Sum) else ((flat, 1),):
        if loop_axis not in term.atoms:
            continue
        if term is loop_axis:
            parts.append((ONE, factor))
        elif isinstance(term, Product) and term.factors.count(loop_axis) == 1:
            rest = [part for part in term.factors if part is not loop_axis]
            if any(isinstance(atom, Axis) for part in rest for atom in part.atoms):
                return None
            parts.append((product(rest), factor))
        else:
            return None
    return add(parts)


def same_strides(sizes: Sequence[Index], left: Sequence[Index], right: Sequence[Index]) -> bool:
    """Equal where a dimension has more than one element."""
    if any(size is ZERO for size in sizes):
        return True
    return all(size is ONE or a is b for size, a, b in zip(sizes, left, right, strict=True))
