"""Conditions that bounds of indices decide, decided; those that stay, asked in 32 bits where these are enough.

What a window of a padded image asks at each of its elements is mostly answered by the place in the window: only its
edges can lie outside.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ferrite.ir import Const, Expr, IndexValue, Op, const, rewrite_nodes
from ferrite.ir.kernel import Accumulate, Let, Loop, Statement, Store, Update, When, nodes_in
from ferrite.schedule.loops.axes import Body
from ferrite.schedule.loops.conditions import SHIFTS, known_value

MAX_INDEX_IN_32_BITS = 1 << 30  # lanes of a block that lie beyond an extent have room above it


def simplified(body: Body) -> Body:
    return tuple(map(simpler, body))


def simpler(statement: Statement) -> Statement:
    match statement:
        case Loop() | Accumulate():
            return replace(statement, body=simplified(statement.body))
        case When():
            return replace(
                statement, condition=rewrite_nodes(statement.condition, decided), body=simplified(statement.body)
            )
    if not any(map(asks_index, nodes_in(statement))):
        return statement
    match statement:
        case Let() | Store():
            return replace(statement, value=rewrite_nodes(statement.value, decided))
        case Update():
            return replace(statement, values=tuple(rewrite_nodes(value, decided) for value in statement.values))
    return statement


def decided(item: Expr) -> Expr:
    """A condition on indices as what it always is, where bounds tell; else in 32 bits, if these are enough."""
    return narrowed(known_value(item))


def asks_index(item: Expr) -> bool:
    """Whether it compares indices."""
    return (
        isinstance(item, Op)
        and item.name in SHIFTS
        and any(isinstance(operand, IndexValue) for operand in item.operands)
    )


def narrowed(item: Expr) -> Expr:
    """A comparison of indices in 32 bits."""
    if not isinstance(item, Op) or not asks_index(item):
        return item
    operands = [in_32_bits(operand) for operand in item.operands]
    if None in operands:
        return item
    return Op.intern(item.name, tuple(operand for operand in operands if operand is not None), item.dtype)


def in_32_bits(value: Expr) -> Expr | None:
    if value.dtype is not torch.int64:
        return None
    if isinstance(value, IndexValue):
        low, high = value.index.low, value.index.high
        fits = low is not None and high is not None and max(-low, high) < MAX_INDEX_IN_32_BITS
        return IndexValue.intern(value.index, torch.int32) if fits else None
    if isinstance(value, Const) and isinstance(value.value, int) and abs(value.value) < MAX_INDEX_IN_32_BITS:
        return const(value.value, torch.int32)
    return None
