"""Matrix products that are loops of our own."""

from __future__ import annotations

from ferrite.ir import Index, arithmetic_type, cast, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import in_memory
from ferrite.lower.table import lowers_later
from ferrite.lower.value import Value, own_axes

Place = tuple[Index, ...]


@lowers_later("ferrite.product.default")
@lowers_later("ferrite.wide_product.default")
def product(ctx: Builder, left: Value, right: Value) -> Value:
    """A sum of products, of 16 bits in 32. Each element of a factor is read many times, so both are in memory."""
    *batch, rows, columns = own_axes(ctx.out_sizes)
    (summed,) = own_axes(left.sizes[-1:], "r")
    return summed_products(ctx, left, (*batch, rows, summed), right, (*batch, summed, columns))


@lowers_later("ferrite.product_of_panels.default")
def product_of_panels(ctx: Builder, left: Value, panels: Value, columns: object) -> Value:
    """The same, of a matrix whose columns are in panels."""
    rows, column = own_axes(ctx.out_sizes)
    (summed,) = own_axes(left.sizes[-1:], "r")
    width = panels.sizes[-1]
    return summed_products(ctx, left, (rows, summed), panels, (column // width, summed, column % width))


def summed_products(ctx: Builder, left: Value, at: Place, right: Value, right_at: Place) -> Value:
    factors = in_memory(ctx, left).at(at), in_memory(ctx, right).at(right_at)
    wide = [cast(factor, arithmetic_type(factor.dtype)) for factor in factors]
    results = add_reduce(ctx, "sum", ctx.out_sizes, left.sizes[-1:], [op("mul", *wide)], [ctx.out_dtype], left.device)
    (result,) = results
    assert result is not None
    return result
