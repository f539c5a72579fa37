"""What a program asserts when it runs, and the numbers from data that it may rest on only then.

torch traces a program as if every assertion held: after `torch._check(z.size(0) == 4)` the size of `z = x.nonzero()`
is 4 in the graph, loops go to 4, and of the assertion `True` is left. So what is known of a number that data decides is
checked here, where it gets its value, before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.ir import (
    ONE,
    ZERO,
    Expr,
    Index,
    Number,
    Symbol,
    cast,
    const,
    index_value,
    number,
    op,
    substitute,
    symbol,
    symbols_in,
)
from ferrite.ir.program import Assert, Bind, Item
from ferrite.lower.builder import Builder
from ferrite.lower.memory import buffer_of
from ferrite.lower.scalars import ScalarReader
from ferrite.lower.sizes import UnknownSize
from ferrite.lower.value import Value

I64, BOOL = torch.int64, torch.bool


def add_assert(ctx: Builder, condition: Expr, message: str, error: type[Exception] = RuntimeError) -> None:
    """Nothing to do for what always holds, or has been asserted; what reads memory is read first."""
    if condition is const(True, BOOL) or condition in ctx.asserted:
        return
    if condition.loads:
        assert_true(ctx, ctx.lazy((), condition, torch.device("cpu")), message, error)
    else:
        ctx.asserted.add(condition)
        ctx.add(Assert(condition, message, ctx.origin, error))


def assert_true(ctx: Builder, value: Value, message: str, error: type[Exception] = RuntimeError) -> None:
    """The one element of a value becomes a symbol that must not be zero."""
    read = symbol(f"checked{len(ctx.buffers)}", 0, 1)
    ctx.bound.add(read)
    ctx.add(Item(read, buffer_of(ctx, value), ctx.origin))
    ctx.add(Assert(op("ne", index_value(read), const(0, I64), dtype=BOOL), message, ctx.origin, error))


def compared(name: str, left: Index | int, right: Index | int) -> Expr:
    """`left <= right` of two whole numbers, as a condition."""
    sides = [const(each, I64) if isinstance(each, int) else index_value(each) for each in (left, right)]
    return op(name, *sides, dtype=BOOL)


def fresh_symbol(ctx: Builder, name: str, low: int | None = None) -> Symbol:
    """A symbol for a number that nothing else is known of yet."""
    found = symbol(f"{name}{len(ctx.bound)}", low)
    ctx.bound.add(found)
    return found


# --- sizes of results -------------------------------------------------------------------------------------------------


def bind_sizes(ctx: Builder, name: str, fake: torch.Tensor, who: str, trusted: bool) -> None:
    """After a call: give symbols that its result is the first to carry their values, and check what is known of them.

    `trusted`: sizes of the result follow from those of the operands, and torch knows how. Otherwise (data decides, or a
    function of the user's says so) every size that is known already is compared with the one that came.
    """
    sizes: Sequence[Any] = fake.shape
    for place, dim in enumerate(sizes):
        expected = ctx.index(dim)
        new = [atom for atom in expected.atoms if isinstance(atom, Symbol) and atom not in ctx.bound]
        if isinstance(expected, Symbol) and new:
            ctx.bound.add(expected)
            ctx.add(Bind(expected, name, "size", place, ctx.origin))
            check_known(ctx, dim, expected, least=0)
        elif new or not trusted:
            came = fresh_symbol(ctx, "size", low=0)
            ctx.add(Bind(came, name, "size", place, ctx.origin))
            if new:
                bind_factor(ctx, came, dim)
            message = f"Runtime assertion failed: dimension {place} of what {who} gave has not the size {expected}"
            add_assert(ctx, compared("eq", came, expected), message)


def bind_factor(ctx: Builder, came: Symbol, dim: torch.SymInt) -> None:
    """A size that was found to be `4 * u1` gives `u1` its value; that the division leaves no rest is checked later."""
    multiple = size_facts.factor_of(dim)
    if multiple is None:
        raise UnknownSize(f"a size {torch_api.expression(dim)} with several unknown numbers in it")
    factor, part = multiple
    bind_number(ctx, ctx.sizes.symbol(part, dim), came // number(factor), dim)


def bind_offset(ctx: Builder, name: str, fake: torch.Tensor) -> None:
    """After a call that returned a view: where it begins, where data decides that and no symbol has it yet."""
    offset, view = fake.storage_offset(), ctx.buffers[name]
    unknown = [] if view.base is None else [each for each in symbols_in(view.offset) if each not in ctx.bound]
    if not unknown or not isinstance(offset, torch.SymInt) or view.base is None:
        return
    rest = substitute(view.offset, {unknown[0]: ZERO})
    if view.offset != unknown[0] + rest:
        raise UnknownSize(f"a view that begins at {torch_api.expression(offset)}, with several unknown numbers in it")
    places = []  # in the storage that torch has for both
    for each in (name, view.base):
        places.append(fresh_symbol(ctx, "offset", low=0))
        ctx.add(Bind(places[-1], each, "offset", 0, ctx.origin))
    sizes = ctx.buffers[view.base].dtype.itemsize, view.dtype.itemsize
    bind_number(ctx, unknown[0], places[0] - places[1] * sizes[0] // sizes[1] - rest, offset)


def bind_number(ctx: Builder, found: Symbol, value: Index, known: torch.SymInt) -> None:
    """Give a symbol a value that follows from others. `known`: a number that it is part of."""
    made = ctx.lazy((), index_value(value), torch.device("cpu"))
    ctx.bound.add(found)
    ctx.add(Item(found, ctx.realise(made.box), ctx.origin))
    check_known(ctx, known, found)


def bind_sums(ctx: Builder, name: str, fake: torch.Tensor) -> None:
    """A tensor from outside with `u0 + 6` rows gives `u0` its value, where no other does: torch has numbers of its own
    for the sizes of incoming gradients."""
    sizes: Sequence[Any] = fake.shape
    for place, dim in enumerate(sizes):
        if isinstance(dim, int):
            continue
        size = ctx.sizes.index(dim)
        unknown = [each for each in symbols_in(size) if each not in ctx.bound]
        if len(unknown) != 1:
            continue
        rest = substitute(size, {unknown[0]: ZERO})
        factor = substitute(size, {unknown[0]: ONE}) - rest
        if isinstance(factor, Number) and factor.value > 0 and size == unknown[0] * factor + rest:
            came = fresh_symbol(ctx, "size", low=0)
            ctx.add(Bind(came, name, "size", place, ctx.origin))
            bind_number(ctx, unknown[0], (came - rest) // factor, dim)


# --- what is known of a symbol ----------------------------------------------------------------------------------------


def check_known(ctx: Builder, value: torch.SymInt | torch.SymBool, bound: Symbol, least: int | None = None) -> None:
    """A symbol has just got its value: check its range, and every assertion whose symbols all have theirs now.
    `least`: no number of this kind is less, so nobody needs to look."""
    failed, range_text = "Runtime assertion failed for expression", f"{bound} is between [{bound.low}, {bound.high}]"
    if bound.low is not None and (least is None or bound.low > least):
        add_assert(ctx, compared("ge", bound, bound.low), f"{failed} {bound} >= {bound.low}: {range_text}")
    if bound.high is not None:
        add_assert(ctx, compared("le", bound, bound.high), f"{failed} {bound} <= {bound.high}: {range_text}")
    names = {each.name for each in ctx.bound} | set(ctx.symbols)
    for condition, said in size_facts.asserted(value):
        free = set(map(str, condition.free_symbols))
        if bound.name in free and free <= names:
            add_assert(ctx, cast(ScalarReader(ctx, value).expr(condition), BOOL), said)
