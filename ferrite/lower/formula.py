"""Elementwise operators as formulas: arithmetic on scalar expressions that reads like arithmetic.

    @lowers(aten.silu.default)
    def silu(ctx, x):
        return pointwise(ctx, lambda x: x / (1 + exp(-x)), x, floating=True)

Operands are converted to the type torch works in, 16-bit floats are then widened to 32 bits, and the result is rounded
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import NARROW, ONE, Expr, arithmetic_type, cast, const, is_integer, op, short
from ferrite.lower.builder import Builder
from ferrite.lower.promotion import Operand, common_type
from ferrite.lower.value import Value

Number = bool | int | float | complex


class Term:
    """A scalar expression with operators. Both sides have one type; a Python number takes that of the other side."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    @property
    def dtype(self) -> torch.dtype:
        return self.expr.dtype

    def to(self, dtype: torch.dtype) -> Term:
        return Term(cast(self.expr, dtype))

    def like(self, other: Term | Number) -> Term:
        return other if isinstance(other, Term) else Term(const(other, self.dtype))

    def call(self, name: str, *others: Term | Number, dtype: torch.dtype | None = None) -> Term:
        return Term(op(name, self.expr, *(self.like(other).expr for other in others), dtype=dtype))

    def __add__(self, other: Term | Number) -> Term:
        return self.call("add", other)

    def __radd__(self, other: Number) -> Term:
        return self.like(other) + self

    def __sub__(self, other: Term | Number) -> Term:
        return self.call("sub", other)

    def __rsub__(self, other: Number) -> Term:
        return self.like(other) - self

    def __mul__(self, other: Term | Number) -> Term:
        return self.call("mul", other)

    def __rmul__(self, other: Number) -> Term:
        return self.like(other) * self

    def __truediv__(self, other: Term | Number) -> Term:
        return self.call("div", other)

    def __rtruediv__(self, other: Number) -> Term:
        return self.like(other) / self

    def __neg__(self) -> Term:
        return self.call("neg")

    def __abs__(self) -> Term:
        return self.call("abs")

    def __lt__(self, other: Term | Number) -> Term:
        return self.call("lt", other, dtype=torch.bool)

    def __le__(self, other: Term | Number) -> Term:
        return self.call("le", other, dtype=torch.bool)

    def __gt__(self, other: Term | Number) -> Term:
        return self.call("gt", other, dtype=torch.bool)

    def __ge__(self, other: Term | Number) -> Term:
        return self.call("ge", other, dtype=torch.bool)

    def equals(self, other: Term | Number) -> Term:
        return self.call("eq", other, dtype=torch.bool)

    def differs(self, other: Term | Number) -> Term:
        return self.call("ne", other, dtype=torch.bool)

    def __and__(self, other: Term) -> Term:
        return self.call("logical_and", other)

    def __or__(self, other: Term) -> Term:
        return self.call("logical_or", other)

    def __invert__(self) -> Term:
        return self.call("logical_not")


def _function(name: str) -> Callable[[Term], Term]:
    return lambda term: term.call(name)


exp, expm1, log, log1p = map(_function, ("exp", "expm1", "log", "log1p"))
sqrt, tanh, ndtr, sigmoid = map(_function, ("sqrt", "tanh", "special_ndtr", "sigmoid"))


def is_nan(term: Term) -> Term:
    return term.call("isnan", dtype=torch.bool)


def larger(left: Term, right: Term | Number) -> Term:
    """NaN wins."""
    return left.call("maximum", right)


def smaller(left: Term, right: Term | Number) -> Term:
    return left.call("minimum", right)


def choose(mask: Term, yes: Term | Number, no: Term | Number) -> Term:
    if not isinstance(yes, Term):
        assert isinstance(no, Term)
        yes = no.like(yes)
    return Term(op("where", mask.expr, yes.expr, yes.like(no).expr, dtype=yes.dtype))


# --- values -----------------------------------------------------------------------------------------------------------


def first_device(ctx: Builder) -> torch.device:
    fake = ctx.out[0] if isinstance(ctx.out, (tuple, list)) else ctx.out
    device: torch.device = fake.device
    return device


def is_tiny(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type that elements are looked at in; floats of 8 bits have one, too."""
    return torch.float32 if is_tiny(dtype) else arithmetic_type(dtype)


# The kinds of elements that operators take in eager.
TAKES: dict[str, Callable[[torch.dtype], bool]] = {
    "stored": lambda dtype: True,  # with floats of 8 bits, on which there is no arithmetic
    "any": lambda dtype: not is_tiny(dtype),
    "real": lambda dtype: not dtype.is_complex and not is_tiny(dtype),
    "number": lambda dtype: not dtype.is_complex and not is_tiny(dtype) and dtype is not torch.bool,
    "float": lambda dtype: dtype.is_floating_point and not is_tiny(dtype),
    "wide": lambda dtype: not dtype.is_complex and not is_tiny(dtype) and dtype not in NARROW,
    "complex or float": lambda dtype: dtype.is_complex or (dtype.is_floating_point and not is_tiny(dtype)),
    "integer": is_integer,
    "whole": lambda dtype: is_integer(dtype) and dtype is not torch.bool,
}


def working_type(ctx: Builder, *args: Operand, floating: bool = False, takes: str = "any") -> torch.dtype:
    """The type an operator works in, before 16-bit floats are widened: that of its operands together.

    What eager refuses is left to it, so that the error is its own.
    """
    common = common_type(*args)
    if not TAKES[takes](common):
        raise NotLowered(f"elements of type {short(common)}, which are eager's business")
    if floating and is_integer(common):
        common = ctx.out_dtype if not is_integer(ctx.out_dtype) else torch.get_default_dtype()
    return common


def term(ctx: Builder, arg: Any, dtype: torch.dtype) -> Term:
    """The element of an operand, over the axes of the result, in a type."""
    return Term(cast(ctx.elements(arg, ctx.out_sizes), dtype))


def operands(ctx: Builder, args: Sequence[Any], dtype: torch.dtype, exact: bool = False) -> list[Term]:
    """Elements in the type that arithmetic is done in, rounded to the common type first; `exact`: numbers are not."""
    wide = wide_type(dtype)
    return [term(ctx, arg, wide) if exact and is_number(arg) else term(ctx, arg, dtype).to(wide) for arg in args]


def is_number(arg: Any) -> bool:
    """A Python number, or a tensor of one element on the CPU, which eager takes for one."""
    return not isinstance(arg, Value) or (arg.device.type == "cpu" and all(size is ONE for size in arg.sizes))


def check_fits(number: Any, dtype: torch.dtype) -> None:
    """A number beyond the type is an error in eager, wherever an operator has it as a parameter."""
    if not isinstance(number, (int, float)) or isinstance(number, bool) or (number != number) or dtype.is_complex:
        return
    if dtype.is_floating_point:
        fits = abs(number) <= torch.finfo(dtype).max or abs(number) == math.inf
    else:
        limits = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = limits[0] <= number <= limits[1]
    if not fits:
        raise NotLowered(f"the number {number}, which {short(dtype)} does not hold")


def pointwise(
    ctx: Builder,
    make: Callable[..., Term],
    *args: Any,
    floating: bool = False,
    takes: str = "any",
    exact: bool = False,
    numbers: Sequence[Any] = (),
) -> Value:
    """What a formula makes of operands.

    `floating`: integers become floats first. `exact`: Python numbers are not rounded to 16 bits. `numbers` come after
    the operands and have no say in the type.
    """
    dtype = working_type(ctx, *args, floating=floating, takes=takes)
    for number in numbers:
        check_fits(number, dtype)
    wide = arithmetic_type(dtype)
    return result(ctx, make(*operands(ctx, args, dtype, exact), *(term(ctx, item, wide) for item in numbers)))


def result(ctx: Builder, made: Term) -> Value:
    return ctx.lazy(ctx.out_sizes, cast(made.expr, ctx.out_dtype), first_device(ctx))


def elementwise(
    ctx: Builder, name: str, *args: Operand, floating: bool = False, takes: str = "any", exact: bool = False
) -> Value:
    """One scalar operator."""
    return pointwise(
        ctx, lambda first, *others: first.call(name, *others), *args, floating=floating, takes=takes, exact=exact
    )


def compared(ctx: Builder, name: str, *args: Operand) -> Value:
    """Operands converted to their common type; a number compared with 16-bit floats is rounded to them first."""
    first, *others = operands(ctx, args, working_type(ctx, *args, takes="stored" if name in ("eq", "ne") else "real"))
    return result(ctx, first.call(name, *others, dtype=torch.bool))
