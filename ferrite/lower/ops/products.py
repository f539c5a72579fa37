"""Matrix products that are loops of our own."""

from __future__ import annotations

from ferrite.ir import op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import in_memory
from ferrite.lower.table import lowers_later
from ferrite.lower.value import Value, own_axes


@lowers_later("ferrite.product.default")
def product(ctx: Builder, left: Value, right: Value) -> Value:
    """A sum of products. Each element of a factor is read many times, so both are in memory."""
    *batch, rows, columns = own_axes(ctx.out_sizes)
    (summed,) = own_axes(left.sizes[-1:], "r")
    factors = (
        in_memory(ctx, left).at((*batch, rows, summed)),
        in_memory(ctx, right).at((*batch, summed, columns)),
    )
    results = add_reduce(
        ctx, "sum", ctx.out_sizes, left.sizes[-1:], [op("mul", *factors)], [ctx.out_dtype], left.device
    )
    (result,) = results
    assert result is not None
    return result
