"""Numbers that data decides: items, sizes asked for at run time, and what is asserted of both."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.errors import NotLowered
from ferrite.ir import ZERO, Expr, Index, Symbol, cast, const, index_value, op
from ferrite.ir.program import Bind, Item
from ferrite.lower.assertions import add_assert, assert_true, check_known, compared, fresh_symbol
from ferrite.lower.builder import Builder
from ferrite.lower.memory import buffer_of, copied
from ferrite.lower.scalars import expression, remember
from ferrite.lower.sizes import constant_value
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value

aten = torch.ops.aten
I64, F64, BOOL = torch.int64, torch.float64, torch.bool

eager(
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor,
    because="the shape of its result depends on data",
)  # fmt: skip
eager(aten.equal.default, aten.is_nonzero.default, aten.allclose.default, because="its result is a number of the host")


# --- items ------------------------------------------------------------------------------------------------------------


@lowers(aten._local_scalar_dense.default)
def item(ctx: Builder, x: Value) -> Any:
    """A whole number or a truth becomes a symbol, a fraction an expression that reads a copy."""
    element = x.view((), [ZERO] * x.rank)
    if isinstance(ctx.out, torch.SymFloat):
        number = cast(copied(ctx, element).at(()), F64)
        remember(ctx, number, ctx.out)
        return number
    if isinstance(ctx.out, (torch.SymInt, torch.SymBool)):
        read_symbol(ctx, element, ctx.out)
        return ctx.out if isinstance(ctx.out, torch.SymInt) else truth(ctx, ctx.out)
    if isinstance(ctx.out, (bool, int, float)):  # torch found out, or was told, which number it is
        equal = op("eq", element.at(()), const(ctx.out, x.dtype), dtype=BOOL)
        assert_true(ctx, ctx.lazy((), equal, x.device), f"Runtime assertion failed: a number is not {ctx.out}")
    return ctx.out


def read_symbol(ctx: Builder, element: Value, out: torch.SymInt | torch.SymBool) -> None:
    """Give the symbol that torch made for a number its value; where `u0` was found to be `4*u1`, that of `u1`."""
    multiple = size_facts.factor_of(out)
    if multiple is None or isinstance(out, torch.SymBool):
        (raw,) = size_facts.symbols_of(out)
        made = ctx.sizes.symbol(raw, out)
        bind_item(ctx, made, element, out)
        index = ctx.sizes.index(out) if isinstance(out, torch.SymInt) else made
        if index is not made:
            add_assert(ctx, compared("eq", made, index), f"Runtime assertion failed: {made} is not {index}")
    if multiple is None:
        return
    factor, raw = multiple
    if factor != 1:
        whole_number = cast(element.at(()), I64)
        check_divides(ctx, element, whole_number, factor)
        element = ctx.lazy((), op("floor_divide", whole_number, const(factor, I64)), element.device)
    if not (isinstance(out, torch.SymBool) and ctx.sizes.symbol(raw, out) in ctx.bound):
        bind_item(ctx, ctx.sizes.symbol(raw, out), element, out)


def bind_item(ctx: Builder, name: Symbol, element: Value, out: torch.SymInt | torch.SymBool) -> None:
    if name in ctx.bound:
        read = fresh_symbol(ctx, "item")
        ctx.add(Item(read, buffer_of(ctx, element), ctx.origin))
        add_assert(ctx, compared("eq", read, name), f"Runtime assertion failed: a number is not {name}")
    else:
        ctx.bound.add(name)
        ctx.add(Item(name, buffer_of(ctx, element), ctx.origin))
        check_known(ctx, out, name, least=0 if isinstance(out, torch.SymBool) else None)


def check_divides(ctx: Builder, element: Value, whole_number: Expr, factor: int) -> None:
    rest = op("remainder", whole_number, const(factor, I64))
    divides = op("eq", rest, const(0, I64), dtype=BOOL)
    assert_true(ctx, ctx.lazy((), divides, element.device), f"a number from memory is no multiple of {factor}")


def truth(ctx: Builder, out: torch.SymBool) -> Expr:
    (name,) = (ctx.sizes.symbol(each, out) for each in size_facts.symbols_of(out))  # as it was bound
    return op("ne", index_value(name), const(0, I64), dtype=BOOL)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _query(overload: Any, query: Any) -> None:
    @lowers(overload)
    def lower(ctx: Builder, x: Value, dim: int = 0) -> Any:
        """Known from the shape; asked for where nobody has said so far."""
        if torch_api.bare_symbol(ctx.out) is not None:
            index = ctx.sizes.index(ctx.out)
            if isinstance(index, Symbol) and index not in ctx.bound:
                ctx.bound.add(index)
                ctx.add(Bind(index, buffer_of(ctx, x), query, dim % max(x.rank, 1), ctx.origin))
        return ctx.out


for _overload, _name in (
    (aten.sym_size.int, "size"),
    (aten.sym_stride.int, "stride"),
    (aten.sym_storage_offset.default, "offset"),
):
    _query(_overload, _name)


@lowers(aten.sym_numel.default, aten.sym_size.default, aten.sym_stride.default, torch.ops.prim.device.default)
def known_already(ctx: Builder, **operands: Any) -> Any:
    return ctx.out


# --- assertions -------------------------------------------------------------------------------------------------------


@lowers(aten._assert_scalar.default)
def assert_scalar(ctx: Builder, x: Any, assert_msg: str) -> None:
    condition = expression(ctx, x)
    if not isinstance(condition, Expr):
        raise NotLowered("a condition that is no expression")
    add_assert(ctx, cast(condition, BOOL), assert_msg)


@lowers(aten._assert_async.default)
def assert_async(ctx: Builder, x: Value) -> None:
    checked_tensor(ctx, x, "Expected Tensor with single nonzero value, but got zero")


@lowers(aten._assert_async.msg)
def assert_async_message(ctx: Builder, x: Value, assert_msg: str) -> None:
    checked_tensor(ctx, x, assert_msg)


@lowers(aten._functional_assert_async.msg)
def functional_assert_async(ctx: Builder, x: Value, assert_msg: str, dep_token: Value) -> Value:
    checked_tensor(ctx, x, assert_msg)
    return dep_token


def checked_tensor(ctx: Builder, x: Value, message: str) -> None:
    if x.device.type != "cpu":
        raise NotLowered("the host does not wait for the device to check it")
    element = x.view((), [ZERO] * x.rank)
    zero = const(0, x.dtype)
    assert_true(ctx, ctx.lazy((), op("ne", element.at(()), zero, dtype=BOOL), x.device), message)


@lowers(aten.sym_constrain_range.default)
def sym_constrain_range(ctx: Builder, size: Any, min: int | None, max: int | None) -> None:
    assert_range(ctx, size, min, max)


@lowers(aten.sym_constrain_range_for_size.default)
def sym_constrain_range_for_size(ctx: Builder, size: Any, min: int | None, max: int | None) -> None:
    assert_range(ctx, size, 0 if min is None else min, max)


@lowers(aten._functional_sym_constrain_range.default)
def functional_sym_constrain_range(
    ctx: Builder, size: Any, min: int | None, max: int | None, dep_token: Value
) -> Value:
    assert_range(ctx, size, min, max)
    return dep_token


@lowers(aten._functional_sym_constrain_range_for_size.default)
def functional_sym_constrain_range_for_size(
    ctx: Builder,
    size: Any,
    min: int | None,
    max: int | None,
    dep_token: Value,
) -> Value:
    assert_range(ctx, size, 0 if min is None else min, max)
    return dep_token


def assert_range(ctx: Builder, size: Any, low: int | None, high: int | None) -> None:
    """The ends of the range that torch took for granted while tracing."""
    if not isinstance(size, (Index, int, torch.SymInt)):
        raise NotLowered("a range of what is no whole number")
    index = ctx.index(size)
    message = f"Invalid value range for {index} between [{low}, {high}]."
    for name, end in (("ge", low), ("le", high)):
        if end is None or (constant_value(index) is not None and in_range(constant_value(index), low, high)):
            continue
        bound = index.low if name == "ge" else index.high
        if isinstance(index, Symbol) and bound is not None and (bound >= end if name == "ge" else bound <= end):
            continue  # it was checked when the symbol got its value
        add_assert(ctx, op(name, index_value(index), const(end, I64), dtype=BOOL), message)


def in_range(value: int | None, low: int | None, high: int | None) -> bool:
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


@lowers(aten._assert_tensor_metadata.default)
def assert_tensor_metadata(ctx: Builder, **operands: Any) -> None:
    """Sizes, strides, type and device were compared while tracing, and the guards keep them."""
