"""Matrix products among reductions: sums over one axis of products of two factors, of which each has an axis that the
other has not. Which of them a device arranges as such is for the device to say."""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.ir import DOTS, Axis, Expr, Op
from ferrite.ir.program import Operation, Reduce

PRODUCTS = ("mul", *DOTS)


@dataclass(frozen=True)
class ProductAxes:
    """`rows`: the axis that only the left factor has; `columns`: the one that only the right factor has, which comes
    after it in the result; `batch`: all others; `summed`: the one that is no axis of the result."""

    batch: tuple[Axis, ...]
    rows: Axis
    columns: Axis
    summed: Axis


def factors_in(operation: Operation) -> tuple[Expr, Expr] | None:
    """The two factors of an operation that adds products up along one axis."""
    if not isinstance(operation, Reduce) or operation.kind != "sum" or len(operation.reduced) != 1:
        return None
    (value,) = operation.values
    if not isinstance(value, Op) or value.name not in PRODUCTS:
        return None
    left, right = value.operands
    return left, right


def product_in(operation: Operation) -> ProductAxes | None:
    """The axes of an operation that is a matrix product."""
    factors = factors_in(operation)
    if factors is None or not isinstance(operation, Reduce):
        return None
    one, other = (axes_under(factor) for factor in factors)
    (summed,) = operation.reduced
    only = [item for item in operation.axes if (item in one) != (item in other)]
    if len(only) != 2 or (only[0] in one) == (only[1] in one) or summed not in one & other:
        return None
    rows, columns = only
    return ProductAxes(tuple(item for item in operation.axes if item not in only), rows, columns, summed)


def axes_under(value: Expr) -> frozenset[Axis]:
    """The axes that a value depends on, through indices that are read from memory too."""
    return frozenset(atom for atom in value.atoms if isinstance(atom, Axis))
