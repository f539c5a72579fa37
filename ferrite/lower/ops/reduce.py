"""Reductions over some dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, Expr, Index, Number, arithmetic_type, cast, const, index_value, multiply, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.ops.views import dim_of, unsqueeze
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten, prims = torch.ops.aten, torch.ops.prims

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# Over one element these give that element.
KEEPING = frozenset({"sum", "prod", "amax", "amin", "any", "all", "xor"})


def reduced_dims(x: Value, dim: Any) -> list[int]:
    """The dimensions to reduce, in order; none given means all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.rank))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if any(not -max(x.rank, 1) <= each < max(x.rank, 1) for each in dims):
        raise NotLowered("eager refuses a dimension that is not there")  # torch's fake value of a softmax takes any
    return sorted({dim_of(each, x.rank) for each in dims}) if x.rank else []


class Rows:
    """A value seen as rows to reduce: the kept dimensions, the reduced ones, and the element at both."""

    def __init__(self, ctx: Builder, x: Value, dim: Any, keepdim: bool) -> None:
        self.ctx, self.x = ctx, x
        self.dims = reduced_dims(x, dim)
        self.over = [x.sizes[each] for each in self.dims]
        kept = [ONE if each in self.dims else size for each, size in enumerate(x.sizes)]
        self.sizes = kept if keepdim else [size for each, size in enumerate(x.sizes) if each not in self.dims]
        outer, inner = own_axes(self.sizes), own_axes(self.over, "r")
        if keepdim:
            place = [inner[self.dims.index(each)] if each in self.dims else outer[each] for each in range(x.rank)]
        else:
            left, right = iter(outer), iter(inner)
            place = [next(right) if each in self.dims else next(left) for each in range(x.rank)]
        self.place: Sequence[Index] = place

    def element(self, dtype: torch.dtype | None = None) -> Expr:
        """The element at a point, in the type arithmetic on it is done in."""
        expr = self.x.at(self.place)
        return cast(expr, arithmetic_type(expr.dtype) if dtype is None else dtype)

    def of(self, row: Value) -> Expr:
        """The element of a result of these rows, at every point of them."""
        return row.at(own_axes(self.sizes))

    @property
    def count(self) -> Index:
        total: Index = ONE
        for size in self.over:
            total = multiply(total, size)
        return total

    def float_count(self, dtype: torch.dtype) -> Expr:
        return cast(index_value(self.count), dtype)

    def reduce(self, kind: str, value: Expr, *dtypes: torch.dtype | None) -> tuple[Any, ...]:
        return add_reduce(self.ctx, kind, self.sizes, self.over, [value], dtypes, self.x.device)

    def one(self, kind: str, value: Expr, dtype: torch.dtype) -> Value:
        """The only result of a reduction. Over one element there is nothing to combine; a reduction of nothing has
        strides of its own."""
        if kind in KEEPING and all(size is ONE for size in self.over) and ZERO not in self.sizes:
            if kind == "sum" and value.dtype.is_floating_point:
                value = op("add", value, const(0.0, value.dtype))  # a sum begins with 0.0: of -0.0 it is no -0.0
            return self.ctx.lazy(self.sizes, cast(value, dtype), self.x.device)
        result: Value = self.reduce(kind, value, dtype)[0]
        return result

    def none_empty(self) -> Rows:
        """The same, if each row has an element for sure: of none there is no greatest, and eager says so."""
        if any(size.low is None or size.low < 1 for size in self.over):
            raise NotLowered("rows that may be empty have no greatest element")
        return self

    def lazy(self, expr: Expr, dtype: torch.dtype) -> Value:
        """A value per row."""
        return self.ctx.lazy(self.sizes, cast(expr, dtype), self.x.device)


@lowers(aten.sum.default, aten.sum.dim_IntList, prims.sum.default)
def sum_(
    ctx: Builder, x: Value | None = None, dim: Any = None, keepdim: bool = False, dtype: Any = None, **prim: Any
) -> Value:
    x, dim = prim.get("inp", x), prim.get("dims", dim)
    assert x is not None
    rows = Rows(ctx, x, dim, keepdim)
    return rows.one("sum", rows.element(arithmetic_type(ctx.out_dtype)), ctx.out_dtype)


@lowers(aten.prod.default, aten.prod.dim_int, prims.prod.default)
def prod(
    ctx: Builder, x: Value | None = None, dim: Any = None, keepdim: bool = False, dtype: Any = None, **prim: Any
) -> Value:
    x, dim = prim.get("inp", x), prim.get("dims", dim)
    assert x is not None
    rows = Rows(ctx, x, dim, keepdim)
    return rows.one("prod", rows.element(arithmetic_type(ctx.out_dtype)), ctx.out_dtype)


@lowers(prims.xor_sum.default)
def xor_sum(ctx: Builder, inp: Value, dims: Any, output_dtype: Any = None) -> Value:
    rows = Rows(ctx, inp, dims, False)
    return rows.one("xor", rows.element(ctx.out_dtype), ctx.out_dtype)


@lowers(*([aten.hash_tensor.default] if hasattr(aten, "hash_tensor") else []))
def hash_tensor(ctx: Builder, x: Value, dim: Any, keepdim: bool, mode: int) -> Value:
    """The bits of all elements, as doubles or as long integers, one xor the other."""
    if mode != 0 or x.dtype.is_complex or any(size.low == 0 for size in x.sizes):
        raise NotLowered("other than the plain hash of some numbers")
    rows = Rows(ctx, x, dim, keepdim)
    wide = torch.float64 if x.dtype.is_floating_point else torch.int64
    element = rows.element(wide)
    bits = op("bitcast", element, dtype=torch.int64) if wide is torch.float64 else element
    return rows.lazy(op("bitcast", rows.of(rows.one("xor", bits, torch.int64)), dtype=torch.uint64), torch.uint64)


def extreme(ctx: Builder, x: Value, dim: Any, keepdim: bool, largest: bool) -> Value:
    rows = Rows(ctx, x, dim, keepdim).none_empty()
    if x.dtype is torch.bool:
        return rows.one("any" if largest else "all", rows.element(), torch.bool)
    return rows.one("amax" if largest else "amin", rows.element(), ctx.out_dtype)


@lowers(aten.amax.default)
def amax(ctx: Builder, x: Value, dim: Any, keepdim: bool) -> Value:
    return extreme(ctx, x, dim, keepdim, True)


@lowers(aten.amin.default)
def amin(ctx: Builder, x: Value, dim: Any, keepdim: bool) -> Value:
    return extreme(ctx, x, dim, keepdim, False)


@lowers(prims.amax.default)
def prims_amax(ctx: Builder, inp: Value, dims: Any, output_dtype: Any = None) -> Value:
    return extreme(ctx, inp, dims, False, True)


@lowers(prims.amin.default)
def prims_amin(ctx: Builder, inp: Value, dims: Any, output_dtype: Any = None) -> Value:
    return extreme(ctx, inp, dims, False, False)


@lowers(aten.max.default)
def max_all(ctx: Builder, x: Value) -> Value:
    return extreme(ctx, x, None, False, True)


@lowers(aten.min.default)
def min_all(ctx: Builder, x: Value) -> Value:
    return extreme(ctx, x, None, False, False)


def ordered(rows: Rows) -> Expr:
    """The element as something `argmax` can order: truth values as small integers."""
    return rows.element(torch.uint8 if rows.x.dtype is torch.bool else None)


@lowers(aten.max.dim)
def max_dim(ctx: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Any, ...]:
    rows = Rows(ctx, x, [dim], keepdim).none_empty()
    return rows.reduce("argmax", ordered(rows), x.dtype, torch.int64)


@lowers(aten.min.dim)
def min_dim(ctx: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Any, ...]:
    rows = Rows(ctx, x, [dim], keepdim).none_empty()
    return rows.reduce("argmin", ordered(rows), x.dtype, torch.int64)


def place_of(ctx: Builder, x: Value, dim: int | None, keepdim: bool, kind: str) -> Value:
    rows = Rows(ctx, x, dim, keepdim).none_empty()
    place: Value = rows.reduce(kind, ordered(rows), None, torch.int64)[1]
    return place


@lowers(aten.argmax.default)
def argmax(ctx: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return place_of(ctx, x, dim, keepdim, "argmax")


@lowers(aten.argmin.default)
def argmin(ctx: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return place_of(ctx, x, dim, keepdim, "argmin")


def truth(ctx: Builder, x: Value, dim: Any, keepdim: bool, kind: str) -> Value:
    """Whether some, or all, are not zero; a NaN is not zero. Of uint8 eager makes uint8."""
    rows = Rows(ctx, x, dim, keepdim)
    element = x.at(rows.place)
    return rows.one(kind, cast(element, torch.bool), ctx.out_dtype)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return truth(ctx, x, dim, keepdim, "any")


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return truth(ctx, x, dim, keepdim, "all")


@lowers(aten.mean.default, aten.mean.dim)
def mean(ctx: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    wide = arithmetic_type(ctx.out_dtype)
    rows = Rows(ctx, x, dim, keepdim)
    total = rows.one("sum", rows.element(wide), wide)
    return rows.lazy(op("div", rows.of(total), rows.float_count(wide)), ctx.out_dtype)


# --- spread -----------------------------------------------------------------------------------------------------------


def statistics_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What sums over many elements are kept in. On a CPU eager keeps those of single precision in double: a small
    spread about a large mean survives."""
    return torch.float64 if dtype is torch.float32 and device.type == "cpu" else arithmetic_type(dtype)


def moments(rows: Rows, wide: torch.dtype) -> tuple[Expr, Expr]:
    """Mean and sum of squared deviations per row, in one pass."""
    if rows.x.dtype.is_complex:
        return complex_moments(rows, wide)
    mean, deviations, _ = rows.reduce("welford", rows.element(wide), wide, wide, None)
    return rows.of(mean), rows.of(deviations)


def complex_moments(rows: Rows, wide: torch.dtype) -> tuple[Expr, Expr]:
    """The mean of both parts, and the sum of their squared deviations."""
    means, total = [], []
    for part in ("real", "imag"):
        mean, deviations, _ = rows.reduce("welford", op(part, rows.element(), dtype=wide), wide, wide, None)
        means.append(rows.of(mean))
        total.append(rows.of(deviations))
    return op("complex", *means, dtype=rows.x.dtype), op("add", *total)


def variance(rows: Rows, deviations: Expr, correction: Any, wide: torch.dtype) -> Expr:
    """Deviations by the count less `correction`, which never falls below zero."""
    less = 1 if correction is None else correction
    freedom = op("sub", rows.float_count(wide), const(float(less), wide))
    return op("div", deviations, op("maximum", freedom, const(0.0, wide)))


def spread(ctx: Builder, x: Value, dim: Any, correction: Any, keepdim: bool) -> tuple[Rows, Expr, Expr, torch.dtype]:
    rows = Rows(ctx, x, dim, keepdim)
    wide = REAL.get(x.dtype) or statistics_type(x.dtype, x.device)
    mean, deviations = moments(rows, wide)
    return rows, or_nan(rows, mean), variance(rows, deviations, correction, wide), x.dtype


def or_nan(rows: Rows, mean: Expr) -> Expr:
    """The mean; of nothing it is no number."""
    if isinstance(rows.count, Number) and rows.count.value:
        return mean
    none = op("eq", index_value(rows.count), const(0, torch.int64), dtype=torch.bool)
    return op("where", none, const(float("nan"), mean.dtype), mean, dtype=mean.dtype)


@lowers(aten.var.correction)
def var(ctx: Builder, x: Value, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Value:
    rows, _, value, dtype = spread(ctx, x, dim, correction, keepdim)
    return rows.lazy(value, REAL.get(dtype, dtype))


@lowers(aten.var.default, aten.var.dim)
def var_unbiased(ctx: Builder, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Value:
    return var(ctx, x, dim, int(unbiased), keepdim)


@lowers(prims.var.default)
def prims_var(ctx: Builder, inp: Value, dims: Any, correction: Any = 1, output_dtype: Any = None) -> Value:
    return var(ctx, inp, dims, correction, False)


@lowers(aten.std.correction)
def std(ctx: Builder, x: Value, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Value:
    rows, _, value, dtype = spread(ctx, x, dim, correction, keepdim)
    return rows.lazy(op("sqrt", value), REAL.get(dtype, dtype))


@lowers(aten.std.default, aten.std.dim)
def std_unbiased(ctx: Builder, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Value:
    return std(ctx, x, dim, int(unbiased), keepdim)


@lowers(aten.var_mean.correction)
def var_mean(
    ctx: Builder, x: Value, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Value, ...]:
    rows, mean, value, dtype = spread(ctx, x, dim, correction, keepdim)
    return rows.lazy(value, REAL.get(dtype, dtype)), rows.lazy(mean, dtype)


@lowers(aten.std_mean.correction)
def std_mean(
    ctx: Builder, x: Value, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Value, ...]:
    rows, mean, value, dtype = spread(ctx, x, dim, correction, keepdim)
    return rows.lazy(op("sqrt", value), REAL.get(dtype, dtype)), rows.lazy(mean, dtype)


@lowers(aten.aminmax.default)
def aminmax(ctx: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    rows = Rows(ctx, x, dim, keepdim).none_empty()
    kinds = ("all", "any") if x.dtype is torch.bool else ("amin", "amax")
    low, high = (rows.one(kind, rows.element(), x.dtype) for kind in kinds)
    return low, high


@lowers(aten.logsumexp.default)
def logsumexp(ctx: Builder, x: Value, dim: Any, keepdim: bool = False) -> Value:
    """Relative to the greatest; where that is infinite, relative to zero."""
    if any(x.sizes[each] is ZERO for each in reduced_dims(x, dim)):
        raise NotLowered("nothing to add up")
    wide = arithmetic_type(ctx.out_dtype)
    rows = Rows(ctx, x, dim, keepdim)
    real = REAL.get(wide, wide)
    element = op("real", rows.element(), dtype=real) if wide.is_complex else rows.element(wide)
    most = rows.of(rows.one("amax", element, real))
    shift = cast(op("where", op("isinf", most, dtype=torch.bool), const(0.0, real), most, dtype=real), wide)
    total = rows.one("sum", op("exp", op("sub", rows.element(wide), shift)), wide)
    return rows.lazy(op("add", op("log", rows.of(total)), shift), ctx.out_dtype)


@lowers(aten._trilinear.default)
def trilinear(
    ctx: Builder,
    i1: Value,
    i2: Value,
    i3: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """The sum over some dimensions of a product of three, each with dimensions added so that they match."""
    spread_out = []
    for value, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for dim in sorted(dims):
            value = unsqueeze(ctx, value, dim)
        spread_out.append(value)
    sizes = [next((v.sizes[k] for v in spread_out if v.sizes[k] is not ONE), ONE) for k in range(spread_out[0].rank)]
    wide = arithmetic_type(ctx.out_dtype)
    first, second, third = (cast(ctx.elements(value, sizes), wide) for value in spread_out)
    product = ctx.lazy(sizes, op("mul", op("mul", first, second), third), i1.device)
    rows = Rows(ctx, product, list(sumdim), False)
    return rows.one("sum", rows.element(wide), ctx.out_dtype)
