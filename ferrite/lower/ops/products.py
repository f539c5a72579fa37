"""Matrix products that are loops of our own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrite.ir import (
    OPERATORS,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Op,
    arithmetic_type,
    cast,
    data_of,
    indices_of,
    nodes_of,
    op,
)
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import in_memory
from ferrite.lower.table import lowers_later
from ferrite.lower.value import Value, own_axes
from ferrite.machines import GpuMachine, gpu_machine

Place = tuple[Index, ...]
SHORT = (torch.int8, torch.uint8, torch.bfloat16, torch.float16)


@lowers_later("ferrite.product.default")
@lowers_later("ferrite.wide_product.default")
def product(ctx: Builder, left: Value, right: Value) -> Value:
    """A sum of products, of 16 bits in 32."""
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


def factor(ctx: Builder, value: Value, at: Place, readers: Index) -> Expr:
    """Each element of a factor is read many times, so it is in memory. But where one block of a GPU's has all that read
    it, little is computed where it is read: a weight of 8 bits becomes one of 16, and is never in memory as such. On a
    CPU that is done with elements that are converted from shorter ones, which take less time to read."""
    if value.device.type == "cpu" and is_widened(expr := value.at(at)):
        return expr
    machine = gpu_machine()
    if value.device.type == "cuda" and readers.high is not None and readers.high <= machine.max_factor_readers:
        expr = value.at(at)
        if is_little(expr, machine):
            return expr
    return in_memory(ctx, value).at(at)


def is_widened(expr: Expr) -> bool:
    """Whether an element is converted from a shorter one in memory, and nothing else is computed."""
    if not isinstance(expr, Cast) or not isinstance(expr.arg, Load) or any(map(data_of, indices_in([expr.arg]))):
        return False
    return expr.dtype.itemsize > expr.arg.dtype.itemsize and expr.arg.dtype in SHORT


def is_little(expr: Expr, machine: GpuMachine) -> bool:
    nodes = nodes_of(expr)
    if not all(isinstance(item, Load | Cast | Const | Op) for item in nodes) or any(map(data_of, indices_in(nodes))):
        return False
    loads = [item for item in nodes if isinstance(item, Load)]
    work = sum(OPERATORS[item.name].cost for item in nodes if isinstance(item, Op))
    return 0 < len(loads) <= machine.max_factor_loads and work <= machine.max_factor_additions


def indices_in(nodes: Sequence[Expr]) -> list[Index]:
    return [index for item in nodes for index in indices_of(item)]


def summed_products(ctx: Builder, left: Value, at: Place, right: Value, right_at: Place) -> Value:
    rows, columns = ctx.out_sizes[-2:]
    factors = factor(ctx, left, at, columns), factor(ctx, right, right_at, rows)
    wide = [cast(factor, arithmetic_type(factor.dtype)) for factor in factors]
    results = add_reduce(ctx, "sum", ctx.out_sizes, left.sizes[-1:], [op("mul", *wide)], [ctx.out_dtype], left.device)
    (result,) = results
    assert result is not None
    return result
