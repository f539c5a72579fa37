"""Distances between the rows of two matrices: a sum over columns of every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, Expr, Index, arithmetic_type, cast, const, data, index_value, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.ops.conditions import B8
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
I64 = torch.int64
PRODUCT_ROWS = 25  # torch takes a matrix product for distances of more rows than this


def row_of(x: Value, batch: Sequence[Index], row: Index, column: Index) -> Expr:
    """An element of a matrix in a batch that broadcasts."""
    lead = x.rank - 2
    own = [ZERO if size is ONE else item for size, item in zip(x.sizes, batch[len(batch) - lead :], strict=False)]
    return x.at([*own[:lead], row, column])


@lowers(aten._cdist_forward.default)
def cdist_forward(ctx: Builder, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Value:
    if p == 2 and takes_product(x1, x2, compute_mode):
        raise NotLowered("many rows: a matrix product does most of the work")
    sizes, device = ctx.out_sizes, x1.device
    wide, axes = arithmetic_type(ctx.out_dtype), own_axes(sizes)
    columns = x1.sizes[-1]

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        *batch, left, right = outer
        first, second = row_of(x1, batch, left, inner[0]), row_of(x2, batch, right, inner[0])
        return powered(op("abs", op("sub", cast(first, wide), cast(second, wide))), p)

    if columns is ZERO:
        return ctx.fill(sizes, 0, ctx.out_dtype, device)
    (total,) = add_reduce(ctx, "amax" if p == math.inf else "sum", sizes, (columns,), [element], [wide], device)
    assert total is not None
    return ctx.lazy(sizes, cast(root(total.at(axes), p), ctx.out_dtype), device)


@lowers(aten._pdist_forward.default)
def pdist_forward(ctx: Builder, x: Value, p: float) -> Value:
    """Every pair of rows once, in the order (0, 1), (0, 2), ..., (1, 2), ...: the pair is found from its number."""
    rows, columns = x.sizes
    if rows.high is None or columns is ZERO:
        raise NotLowered("rows without a known bound")
    sizes, wide = ctx.out_sizes, arithmetic_type(ctx.out_dtype)
    if ZERO in sizes:
        return ctx.fill(sizes, 0, ctx.out_dtype, x.device)
    axes = own_axes(sizes)
    pair, count = index_value(axes[0]), index_value(rows)
    first: Expr = const(0, I64)
    for bit in reversed(range(rows.high.bit_length())):
        later = op("add", first, const(1 << bit, I64))
        fits = op("lt", later, count, dtype=B8)
        begun = op("le", pairs_before(later, count), pair, dtype=B8)
        first = op("where", op("logical_and", fits, begun), later, first, dtype=I64)
    second = op("add", op("add", op("sub", pair, pairs_before(first, count)), first), const(1, I64))

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        left, right = (cast(x.at([data(row, rows), inner[0]]), wide) for row in (first, second))
        return powered(op("abs", op("sub", left, right)), p)

    (total,) = add_reduce(ctx, "amax" if p == math.inf else "sum", sizes, (columns,), [element], [wide], x.device)
    assert total is not None
    return ctx.lazy(sizes, cast(root(total.at(axes), p), ctx.out_dtype), x.device)


def pairs_before(row: Expr, rows: Expr) -> Expr:
    """How many pairs begin with an earlier row: row * rows - row * (row + 1) / 2."""
    half = op("floor_divide", op("mul", row, op("add", row, const(1, I64))), const(2, I64))
    return op("sub", op("mul", row, rows), half)


def takes_product(x1: Value, x2: Value, mode: int | None) -> bool:
    """Whether torch computes these distances by a matrix product."""
    if mode == 1:
        return True
    many = any(x.sizes[-2].high is None or x.sizes[-2].high > PRODUCT_ROWS for x in (x1, x2))
    return mode in (None, 0) and many


def powered(value: Expr, p: float) -> Expr:
    if p == 0:
        return op(
            "where", op("eq", value, const(0, value.dtype), dtype=B8), value, const(1, value.dtype), dtype=value.dtype
        )
    if p in (1, math.inf):
        return value
    return op("mul", value, value) if p == 2 else op("pow", value, const(p, value.dtype))


def root(value: Expr, p: float) -> Expr:
    if p in (0, 1, math.inf):
        return value
    return op("sqrt", value) if p == 2 else op("pow", value, const(1 / p, value.dtype))


@lowers(aten._cdist_backward.default)
def cdist_backward(ctx: Builder, grad: Value, x1: Value, x2: Value, p: float, cdist: Value) -> Value:
    """For every element, over the rows it was compared with."""
    sizes, device = ctx.out_sizes, grad.device
    if p == 0 or any(size is ZERO for size in (*grad.sizes, *sizes)):
        return ctx.fill(sizes, 0, ctx.out_dtype, device)
    wide = arithmetic_type(ctx.out_dtype)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        *batch, row, column = outer
        mine, theirs = row_of(x1, batch, row, column), row_of(x2, batch, inner[0], column)
        away = op("sub", cast(mine, wide), cast(theirs, wide))
        along = cast(row_of(cdist, batch, row, inner[0]), wide)
        return slope(away, along, cast(row_of(grad, batch, row, inner[0]), wide), p)

    (total,) = add_reduce(ctx, "sum", sizes, (x2.sizes[-2],), [element], [ctx.out_dtype], device)
    assert total is not None
    return total


def slope(away: Expr, distance: Expr, grad: Expr, p: float) -> Expr:
    """How the distance changes with one coordinate; nothing where there is no distance."""
    dtype, zero = away.dtype, const(0, away.dtype)
    none = op("eq", distance, zero, dtype=B8)
    if p == 1:
        return op("mul", grad, op("sign", away))
    if p == math.inf:
        greatest = op("eq", op("abs", away), distance, dtype=B8)
        return op("where", greatest, op("mul", grad, op("sign", away)), zero, dtype=dtype)
    if p == 2:
        part = op("div", op("mul", grad, away), distance)
    else:
        steep = op("pow", op("abs", away), const(p - 1, dtype))
        part = op("div", op("mul", op("mul", op("sign", away), steep), grad), op("pow", distance, const(p - 1, dtype)))
        if p < 1:
            none = op("logical_or", none, op("eq", away, zero, dtype=B8))
    return op("where", none, zero, part, dtype=dtype)


eager(
    aten._pdist_backward.default,
    because="pairs are numbered along a triangle: torch's own kernel",
)
