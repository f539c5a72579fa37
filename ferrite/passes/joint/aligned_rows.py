"""A product that is written where its rows are aligned, though they do not all begin at multiples of 16 bytes.

Every few rows do, or are as far from one. Rows that are alike are a product of their own, from the first aligned column
on; the few columns at either edge are another. With a right matrix whose columns lie contiguous nothing is padded, and
torch writes each product where it belongs (`ferrite.schedule.loops.out_products`): nothing is copied, or there twice.

    mm(a, b)        =>      result = empty(4096, 2046)
                            result[0::4, 0:2040] = mm(a[0::4], b[:, 0:2040])
                            result[1::4, 2:2042] = mm(a[1::4], b[:, 2:2042])    and so on
                            result[:, :8] = mm(a, b[:, :8])
                            result[:, 2038:] = mm(a, b[:, 2038:])
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ferrite.rewrite import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class AlignedRows:
    """The rows of a dense result of m x n; so many elements are aligned."""

    m: int
    n: int
    alignment: int

    @property
    def period(self) -> int:
        """Rows that are so far apart are as far from an aligned place."""
        return self.alignment // math.gcd(self.n, self.alignment)

    @cached_property
    def columns(self) -> list[tuple[int, int]]:
        """For each of the first rows, the columns from and to that are aligned."""
        starts = [-row * self.n % self.alignment for row in range(self.period)]
        return [(start, self.n - (self.n - start) % self.alignment) for start in starts]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Columns on the left and on the right, from and to, some of which are not aligned in some row."""
        found = []
        if any(start > 0 for start, _ in self.columns):
            found.append((0, self.alignment))
        if any(end < self.n for _, end in self.columns):
            found.append((self.n - self.alignment, self.n))
        return found

    def products(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the columns of each product."""
        for row, (start, end) in enumerate(self.columns):
            yield slice(row, self.m, self.period), slice(start, end)
        for start, end in self.edges:
            yield slice(0, self.m, 1), slice(start, end)


def in_aligned_rows(site: Site, left: torch.fx.Node, right: torch.fx.Node, aligned: AlignedRows) -> torch.fx.Node:
    value = site.value(site.node)
    sizes = [aligned.m, aligned.n]
    result: torch.fx.Node = site.call(aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
    for rows, columns in aligned.products():
        which = (rows.start, rows.stop, rows.step)
        some = left if rows.step == 1 else site.call(aten.slice.Tensor, left, 0, *which)
        part = site.call(aten.mm.default, some, site.call(aten.slice.Tensor, right, 1, columns.start, columns.stop))
        if rows.step == 1:
            result = site.call(aten.slice_scatter.default, result, part, 1, columns.start, columns.stop)
            continue
        there = site.call(aten.slice.Tensor, result, 0, *which)
        there = site.call(aten.slice_scatter.default, there, part, 1, columns.start, columns.stop)
        result = site.call(aten.slice_scatter.default, result, there, 0, *which)
    return result
