"""Prefixes and orders along one dimension."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import Expr, arithmetic_type, cast, const
from ferrite.ir.program import Combine
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_scan, add_sort, full_axes
from ferrite.lower.ops.views import dim_of
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten


def element_along(ctx: Builder, x: Value, dim: int, dtype: torch.dtype) -> Expr:
    """The element over the full axes: the dimension scanned has one even where its size is one."""
    axes = list(own_axes(x.sizes))
    axes[dim] = full_axes(ctx, x.sizes, dim)[1]
    return cast(x.at(axes), dtype)


def alone(ctx: Builder, x: Value, *dtypes: torch.dtype) -> tuple[Value, ...]:
    """One element is its own prefix and its own order, at place zero."""
    element = ctx.elements(x, x.sizes)
    values = [cast(element, dtypes[0]), *(const(0, dtype) for dtype in dtypes[1:])]
    return tuple(ctx.lazy(x.sizes, value, x.device) for value in values)


def scanned(ctx: Builder, x: Value, dim: int, kind: str, *dtypes: torch.dtype) -> tuple[Any, ...]:
    if not x.rank:
        return alone(ctx, x, *dtypes)
    at = dim_of(dim, x.rank)
    wide = arithmetic_type(dtypes[0])
    return add_scan(ctx, Combine(kind), x.sizes, at, [element_along(ctx, x, at, wide)], dtypes, x.device)


@lowers(aten.cumsum.default)
def cumsum(ctx: Builder, x: Value, dim: int, dtype: Any) -> Value:
    result: Value = scanned(ctx, x, dim, "sum", ctx.out_dtype)[0]
    return result


@lowers(aten.cumprod.default)
def cumprod(ctx: Builder, x: Value, dim: int, dtype: Any) -> Value:
    result: Value = scanned(ctx, x, dim, "prod", ctx.out_dtype)[0]
    return result


@lowers(aten.logcumsumexp.default)
def logcumsumexp(ctx: Builder, x: Value, dim: int) -> Value:
    result: Value = scanned(ctx, x, dim, "logsumexp", ctx.out_dtype)[0]
    return result


@lowers(aten.cummax.default)
def cummax(ctx: Builder, x: Value, dim: int) -> tuple[Any, ...]:
    return scanned(ctx, x, dim, "cummax", x.dtype, torch.int64)


@lowers(aten.cummin.default)
def cummin(ctx: Builder, x: Value, dim: int) -> tuple[Any, ...]:
    return scanned(ctx, x, dim, "cummin", x.dtype, torch.int64)


def sorted_along(ctx: Builder, x: Value, dim: int, descending: bool, stable: bool) -> tuple[Any, ...]:
    if not x.rank:
        return alone(ctx, x, x.dtype, torch.int64)
    if x.dtype.is_complex:
        raise NotLowered("complex numbers have no order")
    at = dim_of(dim, x.rank)
    key = element_along(ctx, x, at, x.dtype)
    return add_sort(ctx, x.sizes, at, [key], (x.dtype, torch.int64), descending, stable, x.device)


@lowers(aten.sort.default)
def sort(ctx: Builder, x: Value, dim: int, descending: bool) -> tuple[Any, ...]:
    return sorted_along(ctx, x, dim, descending, False)


@lowers(aten.sort.stable)
def sort_stable(ctx: Builder, x: Value, stable: bool | None, dim: int, descending: bool) -> tuple[Any, ...]:
    return sorted_along(ctx, x, dim, descending, bool(stable))


OWN_ORDER = "which of equal elements comes first is torch's own choice"
eager(aten.mode.default, because=OWN_ORDER)
DATA_SHAPE = "how many elements it has depends on the data"
eager(aten._unique.default, aten._unique2.default, aten.unique_dim.default, because=DATA_SHAPE)
eager(aten.unique_consecutive.default, aten.unique_dim_consecutive.default, because=DATA_SHAPE)
