"""A product that is written where its rows are aligned, though they do not all begin at multiples of 16 bytes.

Every few rows do, or are as far from one. Rows that are alike are a product of their own, from the first aligned column
on. With a right matrix whose columns lie contiguous nothing is padded, and torch writes each product where it belongs
(`ferrite.schedule.loops.out_products`): nothing is copied, or there twice. The few columns at both edges are one more
call, of two products, which are aligned, too: they are small, and copied.

    mm(a, b)        =>      result = empty(4096, 2046)
                            result[0::4, 0:2040] = mm(a[0::4], b[:, 0:2040])
                            result[1::4, 2:2042] = mm(a[1::4], b[:, 2:2042])    and so on
                            edges = bmm([a, a], [b[:, :8], b[:, 2038:]])
                            result[:, :8], result[:, 2038:] = edges[0], edges[1]
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
    def edges(self) -> tuple[slice, slice]:
        """Columns on the left and on the right, some of which are not aligned in some row."""
        return slice(0, self.alignment), slice(self.n - self.alignment, self.n)

    @property
    def inner(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the columns of each product of rows that are alike."""
        for row, (start, end) in enumerate(self.columns):
            yield slice(row, self.m, self.period), slice(start, end)


def in_aligned_rows(site: Site, left: torch.fx.Node, right: torch.fx.Node, aligned: AlignedRows) -> torch.fx.Node:
    value = site.value(site.node)
    sizes = [aligned.m, aligned.n]
    result: torch.fx.Node = site.call(aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
    for rows, columns in aligned.inner:
        which = (rows.start, rows.stop, rows.step)
        some = site.call(aten.slice.Tensor, left, 0, *which)
        part = site.call(aten.mm.default, some, site.call(aten.slice.Tensor, right, 1, columns.start, columns.stop))
        there = site.call(aten.slice.Tensor, result, 0, *which)
        there = site.call(aten.slice_scatter.default, there, part, 1, columns.start, columns.stop)
        result = site.call(aten.slice_scatter.default, result, there, 0, *which)
    return with_edges(site, result, left, right, aligned)


def with_edges(
    site: Site, result: torch.fx.Node, left: torch.fx.Node, right: torch.fx.Node, aligned: AlignedRows
) -> torch.fx.Node:
    """Both edges are views of the right matrix, as far from each other as a batch's matrices are."""
    width, apart = aligned.alignment, aligned.n - aligned.alignment
    edges = site.call(aten.transpose.int, site.call(aten.unfold.default, right, 1, width, apart), 0, 1)
    lefts = site.call(aten.expand.default, site.call(aten.unsqueeze.default, left, 0), [2, -1, -1])
    product = site.call(aten.bmm.default, lefts, edges)
    for place, edge in enumerate(aligned.edges):
        part = site.call(aten.select.int, product, 0, place)
        result = site.call(aten.slice_scatter.default, result, part, 1, edge.start, edge.stop)
    return result
