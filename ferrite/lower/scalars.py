"""Numbers in a graph that are no index: fractions, truths, and what is computed from them, as scalar expressions.

Whole numbers are 64 bits wide, fractions are doubles, as Python's are. A number is read off torch's own expression for
it where that is known (`read`), and otherwise follows from the Python function that made it (`number_of`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.ir import Expr, Index, cast, const, index_value, op, symbol
from ferrite.ir.program import Call, Constant, Item, Literal
from ferrite.lower.builder import Builder
from ferrite.lower.sizes import SymbolFacts, UnknownSize
from ferrite.lower.value import Box

I64, F64, B8 = torch.int64, torch.float64, torch.bool
MAX_INTEGER = torch.iinfo(torch.int64).max


def number_of(ctx: Builder, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """What a function of numbers gives. A whole number stays torch's own expression for it."""
    if isinstance(out, (bool, int, float, complex, torch.SymInt)) or out is None:
        return out
    if function in ROUNDED and any(isinstance(arg, Expr) and arg.dtype == F64 for arg in args):
        found = RULES[function](*(expression(ctx, arg) for arg in args))
        ctx.numbers[found] = out  # not as a symbol: `n + 1 - 1` is called `n` as well, which has a value
        return found
    try:
        found = read(ctx, out)
    except UnknownSize:
        if function is round and len(args) > 1:  # Python rounds the decimal number that is meant, not a quotient
            raise
        rule = RULES.get(function)
        if rule is None:
            raise ValueError(f"no number rule for {getattr(function, '__name__', function)}") from None
        found = rule(*(expression(ctx, arg) for arg in args), **kwargs)
    remember(ctx, found, out)
    return found


def expression(ctx: Builder, value: Any) -> Any:
    """A number as a scalar expression; what is none stays as it is."""
    match value:
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return read(ctx, value)
        case Index():
            return index_value(value)
        case bool():
            return const(value, B8)
        case int():
            return const(value, I64)
        case float():
            return const(value, F64)
    return value


# --- torch's expressions ----------------------------------------------------------------------------------------------


def read(ctx: Builder, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Expr:
    """A number off torch's expression for it."""
    return ScalarReader(ctx, value).expr(torch_api.expression(value))


def computed_size(ctx: Builder, value: torch.SymInt) -> Index:
    """A size that goes through fractions: computed when the program runs, and a symbol from there on."""
    made = ctx.lazy((), cast(read(ctx, value), I64), torch.device("cpu"))
    size = symbol(f"n{len(ctx.buffers)}", *size_facts.number_range(value))
    ctx.bound.add(size)
    ctx.add(Item(size, ctx.realise(made.box), ctx.origin))
    return size


def number_input(ctx: Builder, name: str, fake: Any) -> Expr:
    """A fraction or a truth that comes in from outside, as an element of memory."""
    dtype = B8 if isinstance(fake, torch.SymBool) else F64
    box = Box((), dtype, torch.device("cpu"))
    box.buffer = ctx.new_buffer(box)
    made = (("dtype", Literal(str(dtype))),)
    ctx.add(Call("aten.scalar_tensor.default", (Constant(name),), made, (box.buffer,), reason="a number from outside"))
    element = box.at(())
    if isinstance(fake, (torch.SymFloat, torch.SymBool)):
        remember(ctx, element, fake)
    return element


def on_the_host(ctx: Builder, value: Expr) -> Expr:
    """A number as the host can compute it, which reads no memory: calls are given such, and programs return them.

    What reads memory is computed there, and a symbol gets the bits of the result:

        gt(cast(buf0[], f64), 2.0)    =>    buf1[] = cast(gt(cast(buf0[], f64), 2.0), i64);  number2 = buf1[]
                                            ne(number2, 0)
    """
    if not value.loads or value.dtype not in (B8, I64, F64):
        return value
    fraction = value.dtype == F64
    devices = {ctx.buffers[name].device for name in value.loads}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    made = ctx.lazy((), op("bitcast", value, dtype=I64) if fraction else cast(value, I64), device)
    bits = symbol(f"number{len(ctx.buffers)}")
    ctx.bound.add(bits)
    ctx.add(Item(bits, ctx.realise(made.box), ctx.origin))
    if fraction:
        return op("bitcast", index_value(bits), dtype=F64)
    return index_value(bits) if value.dtype == I64 else op("ne", index_value(bits), const(0, I64), dtype=B8)


def remember(ctx: Builder, number: Expr, fake: Any) -> None:
    """A number that is no index, under torch's name for it, if it has one of its own."""
    ctx.numbers[number] = fake
    symbol = torch_api.expression(fake)
    if symbol.is_Symbol:
        ctx.symbols[str(symbol)] = number


class ScalarReader:
    def __init__(self, ctx: Builder, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> None:
        self.ctx, self.value = ctx, value
        self.symbol_facts = SymbolFacts(value)

    def expr(self, part: Any) -> Expr:
        name = type(part).__name__
        if part.is_Symbol:
            return self.symbol(part)
        if part.is_Integer:  # torch computes bounds without end: nothing is beyond the largest number there is
            return const(min(max(int(part), -MAX_INTEGER), MAX_INTEGER), I64)
        if part in (True, False):
            return const(bool(part), B8)
        if part.is_number and part.is_real is not False and not part.args:
            return const(float(part), F64)
        whole = self.whole(part)
        if whole is not None:
            return whole
        make = READ.get(name)
        if make is not None:
            return make(*map(self.expr, part.args))
        if name == "Piecewise":
            return self.piecewise(part)
        unary = name.removeprefix("OpaqueUnaryFn_")
        if unary != name and unary in UNARY:
            return op(unary, cast(self.expr(part.args[0]), F64))
        raise UnknownSize(f"the number {part} ({name})")

    def symbol(self, symbol: Any) -> Expr:
        found = self.ctx.symbols.get(str(symbol))
        if found is not None:
            return found
        if not symbol.is_integer:
            raise UnknownSize(f"the number {symbol}")
        return index_value(self.ctx.sizes.read(symbol, self.symbol_facts))

    def whole(self, part: Any) -> Expr | None:
        """An index expression, where the number is one."""
        if not part.is_integer or any(not symbol.is_integer for symbol in part.free_symbols):
            return None
        try:
            return index_value(self.ctx.sizes.read(part, self.symbol_facts))
        except UnknownSize:
            return None

    def piecewise(self, part: Any) -> Expr:
        *cases, (last, _) = part.args
        result = self.expr(last)
        for value, condition in reversed(cases):
            result = chosen(self.expr(condition), self.expr(value), result)
        return result


def alike(*parts: Expr) -> list[Expr]:
    """Fractions where one is a fraction, else whole numbers."""
    kind = F64 if any(part.dtype == F64 for part in parts) else I64
    return [cast(part, kind) for part in parts]


def folded(name: str) -> Callable[..., Expr]:
    return lambda *parts: reduce(lambda left, right: op(name, left, right), alike(*parts))


def floats(name: str) -> Callable[..., Expr]:
    return lambda *args: op(name, *(cast(arg, F64) for arg in args))


def wholes(name: str) -> Callable[..., Expr]:
    return lambda *args: op(name, *(cast(arg, I64) for arg in args))


def compared(name: str) -> Callable[..., Expr]:
    return lambda left, right: op(name, *alike(left, right), dtype=B8)


def logical(name: str) -> Callable[..., Expr]:
    return lambda *parts: reduce(lambda left, right: op(name, left, right), [cast(part, B8) for part in parts])


def bits(name: str) -> Callable[..., Expr]:
    """Of truths it is the logical operator, of whole numbers that of their bits."""

    def make(*parts: Expr) -> Expr:
        truths = all(part.dtype == B8 for part in parts)
        return logical(f"logical_{name}")(*parts) if truths else wholes(f"bitwise_{name}")(*parts)

    return make


def to_whole(name: str) -> Callable[[Expr], Expr]:
    """A fraction to a whole number, rounded in some way; a whole number is one already."""
    return lambda part: cast(op(name, part), I64) if part.dtype == F64 else cast(part, I64)


def power(base: Expr, exponent: Expr) -> Expr:
    if base.dtype == F64 or exponent.dtype == F64 or getattr(exponent, "value", 0) < 0:
        return floats("pow")(base, exponent)
    return op("pow", *alike(base, exponent))


def chosen(condition: Expr, yes: Expr, no: Expr) -> Expr:
    if yes.dtype != no.dtype:
        yes, no = alike(yes, no)
    return op("where", cast(condition, B8), yes, no, dtype=yes.dtype)


def negated(part: Expr) -> Expr:
    return op("logical_not", cast(part, B8))


UNARY = frozenset(
    ["sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "exp", "log", "asinh", "log2"]
)

# What the classes of sympy, and those that torch adds to them, mean.
READ: dict[str, Callable[..., Expr]] = {
    "Add": folded("add"),
    "Mul": folded("mul"),
    "Pow": power,
    "PowByNatural": power,
    "FloatPow": floats("pow"),
    "FloatTrueDiv": floats("div"),
    "IntTrueDiv": floats("div"),
    "ToFloat": lambda part: cast(part, F64),
    "TruncToFloat": floats("trunc"),
    "TruncToInt": to_whole("trunc"),
    "FloorToInt": to_whole("floor"),
    "CeilToInt": to_whole("ceil"),
    "RoundToInt": to_whole("round"),
    "floor": to_whole("floor"),
    "ceiling": to_whole("ceil"),
    "FloorDiv": wholes("floor_divide"),
    "CleanDiv": wholes("floor_divide"),
    "Mod": wholes("remainder"),
    "PythonMod": wholes("remainder"),
    "Abs": lambda part: op("abs", part),
    "Min": folded("minimum"),
    "Max": folded("maximum"),
    "Identity": lambda part: part,
    "Equality": compared("eq"),
    "Unequality": compared("ne"),
    "StrictLessThan": compared("lt"),
    "LessThan": compared("le"),
    "StrictGreaterThan": compared("gt"),
    "GreaterThan": compared("ge"),
    "And": logical("logical_and"),
    "Or": logical("logical_or"),
    "Not": negated,
    "BitwiseFn_bitwise_and": bits("and"),
    "BitwiseFn_bitwise_or": bits("or"),
    "BitwiseFn_bitwise_xor": bits("xor"),
    "LShift": wholes("bitwise_left_shift"),
    "RShift": wholes("bitwise_right_shift"),
    "Where": chosen,
    "ITE": chosen,
}

# The functions that make numbers out of numbers that torch has no expression for, or none that can be read.
RULES: dict[Any, Callable[..., Any]] = {
    operator.add: folded("add"),
    operator.sub: folded("sub"),
    operator.mul: folded("mul"),
    operator.truediv: floats("div"),
    operator.floordiv: folded("floor_divide"),
    operator.mod: folded("remainder"),
    operator.pow: power,
    operator.neg: lambda value: op("neg", value),
    operator.pos: lambda value: value,
    operator.abs: lambda value: op("abs", value),
    abs: lambda value: op("abs", value),
    math.floor: to_whole("floor"),
    math.ceil: to_whole("ceil"),
    math.trunc: to_whole("trunc"),
    round: to_whole("round"),
    torch.sym_int: to_whole("trunc"),
    torch.sym_float: lambda value: cast(value, F64),
    torch.sym_max: folded("maximum"),
    torch.sym_min: folded("minimum"),
    torch.sym_not: negated,
    torch.sym_ite: chosen,
    operator.and_: bits("and"),
    operator.or_: bits("or"),
    operator.xor: bits("xor"),
    operator.lshift: wholes("bitwise_left_shift"),
    operator.rshift: wholes("bitwise_right_shift"),
    operator.not_: negated,
    operator.eq: compared("eq"),
    operator.ne: compared("ne"),
    operator.lt: compared("lt"),
    operator.le: compared("le"),
    operator.gt: compared("gt"),
    operator.ge: compared("ge"),
}
# Done to fractions as Python does it. torch's expressions are those of real numbers, where `n != n` is never true and
# `n + 1 > n` always; neither holds for a NaN, an infinity or what is rounded.
ROUNDED = frozenset([
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
])  # fmt: skip
for _name in sorted(UNARY):
    RULES[getattr(math, _name, None)] = floats(_name)
    RULES[getattr(torch, f"_sym_{_name}", None)] = floats(_name)
    RULES[getattr(torch, f"sym_{_name}", None)] = floats(_name)
RULES.pop(None, None)
