"""Comparisons, questions about a number, logic, bits, and choices."""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.ir import cast, const, is_integer, op
from ferrite.lower.builder import Builder
from ferrite.lower.formula import Term, compared, elementwise, first_device, result, term, wide_type, working_type
from ferrite.lower.promotion import Operand
from ferrite.lower.stores import write_into
from ferrite.lower.table import lowers
from ferrite.lower.value import Value

aten = torch.ops.aten


def _comparison(name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.Tensor, packet.Scalar)
    def lower(ctx: Builder, x: Operand, other: Operand) -> Value:
        return compared(ctx, name, x, other)


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _comparison(_name)


# --- questions --------------------------------------------------------------------------------------------------------


def wide(ctx: Builder, x: Value) -> Term:
    return term(ctx, x, wide_type(x.dtype))


def answer(ctx: Builder, x: Value, value: bool) -> Value:
    """The same for every element."""
    return ctx.lazy(x.sizes, const(value, torch.bool), x.device)


def _question(name: str, of_integers: bool) -> None:
    @lowers(getattr(aten, name).default)
    def lower(ctx: Builder, x: Value) -> Value:
        if is_integer(x.dtype):
            return answer(ctx, x, of_integers)
        return result(ctx, wide(ctx, x).call(name, dtype=torch.bool))


_question("isnan", False)
_question("isinf", False)


@lowers(aten.isfinite.default)
def isfinite(ctx: Builder, x: Value) -> Value:
    if is_integer(x.dtype):
        return answer(ctx, x, True)
    return result(ctx, wide(ctx, x).call("isfinite", dtype=torch.bool))


@lowers(aten.isposinf.default)
def isposinf(ctx: Builder, x: Value) -> Value:
    return answer(ctx, x, False) if is_integer(x.dtype) else result(ctx, wide(ctx, x).equals(math.inf))


@lowers(aten.isneginf.default)
def isneginf(ctx: Builder, x: Value) -> Value:
    return answer(ctx, x, False) if is_integer(x.dtype) else result(ctx, wide(ctx, x).equals(-math.inf))


@lowers(aten.signbit.default)
def signbit(ctx: Builder, x: Value) -> Value:
    if x.dtype is torch.bool or not x.dtype.is_signed:
        return answer(ctx, x, False)
    if is_integer(x.dtype):
        return result(ctx, wide(ctx, x) < 0)
    working_type(ctx, x, takes="float")
    return result(ctx, wide(ctx, x).call("signbit", dtype=torch.bool))


# --- logic and bits ---------------------------------------------------------------------------------------------------


def _logical(name: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(ctx: Builder, x: Value, other: Value | None = None) -> Value:
        first, *others = (term(ctx, arg, torch.bool) for arg in (x, other) if arg is not None)
        return result(ctx, first.call(name, *others))


for _name in ["logical_and", "logical_or", "logical_xor", "logical_not"]:
    _logical(_name)


@lowers(aten.bitwise_not.default)
def bitwise_not(ctx: Builder, x: Value) -> Value:
    return elementwise(ctx, "logical_not" if x.dtype is torch.bool else "bitwise_not", x, takes="integer")


def bits_of(name: str) -> str:
    """What an operator on bits takes; a truth value has one bit, and nothing to shift."""
    return "whole" if name.endswith("shift") else "integer"


def _bits(name: str, overloads: str) -> None:
    for overload in overloads.split():
        packet, which = overload.split(".")

        @lowers(getattr(getattr(aten, packet), which))
        def lower(ctx: Builder, x: Operand, other: Operand) -> Value:
            return elementwise(ctx, name, x, other, takes=bits_of(name))


_three = "{0}.Tensor {0}.Scalar {0}.Scalar_Tensor"
for _name, _sign in {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}.items():
    _bits(_name, f"{_three.format(_name)} __{_sign}__.Tensor __{_sign}__.Scalar")
_bits(
    "bitwise_left_shift",
    "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor "
    "__lshift__.Tensor __lshift__.Scalar",
)
_bits(
    "bitwise_right_shift",
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar "
    "bitwise_right_shift.Scalar_Tensor __rshift__.Tensor __rshift__.Scalar",
)


# --- choices ----------------------------------------------------------------------------------------------------------


@lowers(aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
def where(ctx: Builder, condition: Value, x: Any, other: Any) -> Value:
    sizes, dtype = ctx.out_sizes, ctx.out_dtype
    chosen = cast(ctx.elements(condition, sizes), torch.bool)
    values = [cast(ctx.elements(value, sizes), dtype) for value in (x, other)]
    return ctx.lazy(sizes, op("where", chosen, *values, dtype=dtype), first_device(ctx))


@lowers(aten.isin.Tensor_Scalar)
def isin_number(ctx: Builder, elements: Value, test_element: Any, assume_unique: bool, invert: bool) -> Value:
    return compared(ctx, "ne" if invert else "eq", elements, test_element)


def _in_place(name: str, function: str) -> None:
    for overload in ("Tensor", "Scalar"):

        @lowers(getattr(getattr(aten, name), overload))
        def lower(ctx: Builder, x: Value, other: Operand) -> Value:
            return write_into(ctx, x, elementwise(ctx, function, x, other, takes=bits_of(function)))


for _name, _operator in {
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}.items():
    _in_place(_name, _operator)
