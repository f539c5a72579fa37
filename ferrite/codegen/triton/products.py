"""Sums of products, block by block, as matrix units make them.

A reduction whose values are products of two factors, of which one does not differ along the columns of the block around
and the other not along its rows, needs no block of all these products: blocks of the factors are multiplied.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from ferrite.codegen.triton.module import Module, Scope
from ferrite.codegen.triton.values import Evaluation
from ferrite.graph import HALVES
from ferrite.ir import Cast, Const, Data, Expr, Load, Op, nodes_of
from ferrite.ir.kernel import Loop, Update
from ferrite.machines import MATRIX_UNIT_SIDE


@dataclass(frozen=True)
class BlockProduct:
    """`left`: the factor that differs along the rows of the block around; `right`: the one along its columns."""

    state: str
    left: Expr
    right: Expr


def block_product(loop: Loop, scope: Scope, tiles: Container[str]) -> BlockProduct | None:
    """What a loop adds up, if blocks of factors can be multiplied for it. `tiles`: what is no memory, but a block that
    lies as the dimensions around do."""
    if loop.kind != "reduction" or len(scope.axes) != 2 or any(mask.bounds is None for mask in scope.masks):
        return None
    if min(loop.lanes, *(item.block.most for item in scope.axes)) < MATRIX_UNIT_SIDE or len(loop.body) != 1:
        return None
    (update,) = loop.body
    if not isinstance(update, Update) or len(update.values) != 1:
        return None
    (value,) = update.values
    if not isinstance(value, Op) or value.name != "mul" or value.dtype is not torch.float32:
        return None
    rows, columns = (item.axis for item in scope.axes)
    left, right = value.operands if rows in value.operands[0].atoms else reversed(value.operands)
    if not {rows, loop.axis} <= left.atoms or not {columns, loop.axis} <= right.atoms:
        return None
    if columns in left.atoms or rows in right.atoms or not all(map(is_read_anew, nodes_of(left, right))):
        return None
    if any(name in tiles for name in left.loads | right.loads):
        return None
    return BlockProduct(update.state, *narrow(left, right))


def is_read_anew(item: Expr) -> bool:
    """Whether a factor made of such parts depends on nothing but memory at the places of its own block."""
    return isinstance(item, Load | Op | Cast | Const) and not any(isinstance(atom, Data) for atom in item.atoms)


def narrow(left: Expr, right: Expr) -> tuple[Expr, Expr]:
    """Two factors of 16 bits as they are: their products are exact in the 32 bits of a sum."""
    if isinstance(left, Cast) and isinstance(right, Cast):
        one, other = left.arg, right.arg
        if one.dtype == other.dtype and one.dtype in HALVES:
            return one, other
    return left, right


def factor(module: Module, value: Expr, scope: Scope, summed: int) -> str:
    """A block of a factor, rows by what is summed or that by columns; `summed`: which dimension that is. Beyond its end
    the block is zero: nothing else will do, on either side, as zero times infinity is no number. A load under a mask
    gives zero by itself."""
    evaluation = Evaluation(module, scope)
    found = evaluation.value(value)
    text = found.at(2)
    if found.dims != scope.dims:
        text = f"tl.broadcast_to({text}, {scope.shape()})"
    inside = [mask.value for mask in scope.masks if mask.bounds == summed]
    if inside and not isinstance(value, Load):
        text = f"tl.where({evaluation.both(*inside).at(2)}, {text}, 0.0)"
    return text
