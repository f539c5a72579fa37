"""The scalar operators as instructions, one row each: what `ferrite.ir.scalar` says, element by element.

A row is a function of the emission, the type of the operands, the lanes, and the operands' names. No instruction has a
fast-math flag: NaN, infinities and the sign of zero are eager's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ferrite.codegen.llvm.emission import Emission
from ferrite.codegen.llvm.types import BITS, INTEGER_OF, REGISTER, is_signed, number, vector

Row = Callable[..., str]
ROWS: dict[str, Row] = {}
TAKES: dict[str, Callable[[torch.dtype], bool]] = {}


def is_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


def is_bool(dtype: torch.dtype) -> bool:
    return dtype is torch.bool


def is_whole(dtype: torch.dtype) -> bool:
    return dtype in REGISTER and not dtype.is_floating_point and dtype is not torch.bool


def row(*names: str, takes: Callable[[torch.dtype], bool] = lambda dtype: True) -> Callable[[Row], Row]:
    def register(function: Row) -> Row:
        for name in names:
            ROWS[name], TAKES[name] = function, takes
        return function

    return register


# --- building blocks --------------------------------------------------------------------------------------------------


class Words:
    """Instructions on one type; what they are called with are names, what they give too."""

    def __init__(self, emission: Emission, element: str, lanes: int) -> None:
        self.e, self.element, self.lanes = emission, element, lanes
        self.type = vector(element, lanes)
        self.bits = vector("i1", lanes)

    def op(self, word: str, *operands: str) -> str:
        return self.e.op(f"{word} {self.type} {', '.join(operands)}", *operands)

    def call(self, name: str, *operands: str) -> str:
        return self.e.intrinsic(name, self.element, self.lanes, *operands)

    def const(self, value: float) -> str:
        return self.e.splat(number(value, self.element), self.element, self.lanes)

    def select(self, condition: str, yes: str, no: str) -> str:
        text = f"select {self.bits} {condition}, {self.type} {yes}, {self.type} {no}"
        return self.e.op(text, condition, yes, no)

    def convert(self, word: str, value: str, element: str) -> str:
        """A conversion of this type to another."""
        return self.e.op(f"{word} {self.type} {value} to {vector(element, self.lanes)}", value)

    def as_type(self, element: str) -> Words:
        return Words(self.e, element, self.lanes)

    def compare(self, word: str, left: str, right: str) -> str:
        kind = "fcmp" if self.element in INTEGER_OF else "icmp"
        return self.e.op(f"{kind} {word} {self.type} {left}, {right}", left, right)


def words(emission: Emission, dtype: torch.dtype, lanes: int) -> Words:
    return Words(emission, REGISTER[dtype], lanes)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _plain(name: str, of_float: str, of_integer: str, of_bool: str) -> None:
    @row(name)
    def make(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
        word = of_float if is_float(dtype) else of_bool if is_bool(dtype) else of_integer
        return words(e, dtype, lanes).op(word, left, right)


_plain("add", "fadd", "add", "or")
_plain("mul", "fmul", "mul", "and")
_plain("sub", "fsub", "sub", "xor")


@row("div", takes=is_float)
def div(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
    return words(e, dtype, lanes).op("fdiv", left, right)


@row("neg", takes=lambda dtype: not is_bool(dtype))
def neg(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    w = words(e, dtype, lanes)
    return w.op("fneg", value) if is_float(dtype) else w.op("sub", w.const(0), value)


def _extreme(name: str, of_float: str, word: str, of_bool: str) -> None:
    @row(name)
    def make(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
        w = words(e, dtype, lanes)
        if is_bool(dtype):
            return w.op(of_bool, left, right)
        return w.call(of_float if is_float(dtype) else f"{'s' if is_signed(dtype) else 'u'}{word}", left, right)


_extreme("maximum", "maximum", "max", "or")
_extreme("minimum", "minimum", "min", "and")
_extreme("fmax", "maxnum", "max", "or")
_extreme("fmin", "minnum", "min", "and")


@row("abs")
def absolute(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    w = words(e, dtype, lanes)
    if is_float(dtype):
        return w.call("fabs", value)
    return w.call("smax", value, w.op("sub", w.const(0), value)) if is_signed(dtype) else value


@row("sign")
def sign(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    """Of NaN, and of both zeros, it is 0."""
    if is_bool(dtype):
        return value
    w = words(e, dtype, lanes)
    above, below = ("ogt", "olt") if is_float(dtype) else ("sgt" if is_signed(dtype) else "ugt", "slt")
    up = w.select(w.compare(above, value, w.const(0)), w.const(1), w.const(0))
    if not is_float(dtype) and not is_signed(dtype):
        return up
    return w.select(w.compare(below, value, w.const(0)), w.const(-1), up)


def _rounding(name: str, intrinsic: str) -> None:
    @row(name, takes=is_float)
    def make(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
        return words(e, dtype, lanes).call(intrinsic, value)


for _name, _intrinsic in (
    ("ceil", "ceil"),
    ("floor", "floor"),
    ("trunc", "trunc"),
    ("round", "roundeven"),
    ("sqrt", "sqrt"),
):
    _rounding(_name, _intrinsic)


@row("rsqrt", takes=is_float)
def rsqrt(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    w = words(e, dtype, lanes)
    return w.op("fdiv", w.const(1), w.call("sqrt", value))


@row("reciprocal", takes=is_float)
def reciprocal(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    w = words(e, dtype, lanes)
    return w.op("fdiv", w.const(1), value)


@row("fma", takes=is_float)
def fma(e: Emission, dtype: torch.dtype, lanes: int, *operands: str) -> str:
    return words(e, dtype, lanes).call("fma", *operands)


@row("copysign", takes=is_float)
def copysign(e: Emission, dtype: torch.dtype, lanes: int, *operands: str) -> str:
    return words(e, dtype, lanes).call("copysign", *operands)


# --- comparisons ------------------------------------------------------------------------------------------------------


def _comparison(name: str, of_float: str, word: str) -> None:
    @row(name)
    def make(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
        if is_float(dtype):
            kind = of_float
        elif word in ("eq", "ne"):
            kind = word
        else:
            kind = f"{'s' if is_signed(dtype) else 'u'}{word}"
        return words(e, dtype, lanes).compare(kind, left, right)


for _name in ("eq", "lt", "le", "gt", "ge"):
    _comparison(_name, f"o{_name}", _name)
_comparison("ne", "une", "ne")


def _constant_bool(value: bool, e: Emission, lanes: int) -> str:
    return e.splat("true" if value else "false", "i1", lanes)


@row("isnan")
def isnan(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return words(e, dtype, lanes).compare("uno", value, value) if is_float(dtype) else _constant_bool(False, e, lanes)


@row("isinf")
def isinf(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return _beside_infinity(e, dtype, lanes, value, "oeq") if is_float(dtype) else _constant_bool(False, e, lanes)


@row("isfinite")
def isfinite(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return _beside_infinity(e, dtype, lanes, value, "olt") if is_float(dtype) else _constant_bool(True, e, lanes)


def _beside_infinity(e: Emission, dtype: torch.dtype, lanes: int, value: str, comparison: str) -> str:
    """How a magnitude compares with infinity."""
    w = words(e, dtype, lanes)
    return w.compare(comparison, w.call("fabs", value), w.const(float("inf")))


@row("signbit")
def signbit(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    if not is_float(dtype) and not is_signed(dtype):
        return _constant_bool(False, e, lanes)
    w = words(e, dtype, lanes)
    if is_float(dtype):
        integer = INTEGER_OF[w.element]
        value, w = w.convert("bitcast", value, integer), w.as_type(integer)
    return w.compare("slt", value, w.const(0))


# --- logic and bits ---------------------------------------------------------------------------------------------------


def _logic(word: str, *names: str) -> None:
    @row(*names)
    def make(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
        return words(e, dtype, lanes).op(word, left, right)


_logic("and", "logical_and", "bitwise_and")
_logic("or", "logical_or", "bitwise_or")
_logic("xor", "logical_xor", "bitwise_xor")


@row("logical_not", "bitwise_not")
def complement(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    w = words(e, dtype, lanes)
    return w.op("xor", value, _constant_bool(True, e, lanes) if is_bool(dtype) else w.const(-1))


@row("bitwise_left_shift", takes=is_whole)
def left_shift(e: Emission, dtype: torch.dtype, lanes: int, value: str, count: str) -> str:
    """By more bits than there are, or by fewer than none, nothing is left."""
    w = words(e, dtype, lanes)
    inside = w.compare("ult", count, w.const(BITS[w.element]))
    shifted = w.op("shl", value, w.select(inside, count, w.const(0)))
    return w.select(inside, shifted, w.const(0))


@row("bitwise_right_shift", takes=is_whole)
def right_shift(e: Emission, dtype: torch.dtype, lanes: int, value: str, count: str) -> str:
    """By more bits than there are the sign is left."""
    w = words(e, dtype, lanes)
    most = BITS[w.element] - 1
    if is_signed(dtype):
        return w.op("ashr", value, w.call("umin", count, w.const(most)))
    inside = w.compare("ule", count, w.const(most))
    return w.select(inside, w.op("lshr", value, w.select(inside, count, w.const(0))), w.const(0))


# --- parts of numbers -------------------------------------------------------------------------------------------------


@row("real", "conj")
def itself(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return value


@row("imag", takes=is_float)
def imag(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return words(e, dtype, lanes).const(0)


@row("angle", takes=is_float)
def angle(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    """Of a real number: 0 or pi; NaN stays."""
    w = words(e, dtype, lanes)
    half = w.select(w.compare("olt", value, w.const(0)), w.const(3.141592653589793), w.const(0))
    return w.select(w.compare("uno", value, value), value, half)


@row("nextafter", takes=is_float)
def nextafter(e: Emission, dtype: torch.dtype, lanes: int, value: str, toward: str) -> str:
    """One step of the bits, which count up away from zero."""
    w = words(e, dtype, lanes)
    i = w.as_type(INTEGER_OF[w.element])
    bits, zero = w.convert("bitcast", value, i.element), w.const(0)
    away = w.compare("olt", value, toward)  # up
    grows = e.op(f"xor {w.bits} {away}, {(negative := i.compare('slt', bits, i.const(0)))}", away, negative)
    moved = i.op("add", bits, i.select(grows, i.const(1), i.const(-1)))
    smallest = i.select(away, i.const(1), i.op("or", i.const(1), i.const(-1 << (BITS[i.element] - 1))))
    moved = i.select(w.compare("oeq", value, zero), smallest, moved)
    found = w.select(w.compare("oeq", value, toward), toward, i.convert("bitcast", moved, w.element))
    return w.select(w.compare("uno", value, toward), w.op("fadd", value, toward), found)


def _frexp(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> tuple[str, str]:
    """Mantissa and exponent (as an integer of the type's size); numbers that are too small are made larger first."""
    w = words(e, dtype, lanes)
    i = w.as_type(INTEGER_OF[w.element])
    fraction, bias = (23, 127) if w.element == "float" else (52, 1023)
    tiny = w.compare("olt", w.call("fabs", value), w.const(2.0 ** (1 - bias)))
    scaled = w.select(tiny, w.op("fmul", value, w.const(2.0 ** (fraction + 2))), value)
    bits = w.convert("bitcast", scaled, i.element)
    ones = 2 * bias + 1
    field = i.op("and", i.op("lshr", bits, i.const(fraction)), i.const(ones))
    exponent = i.op("sub", field, i.select(tiny, i.const(bias - 1 + fraction + 2), i.const(bias - 1)))
    kept = i.op("and", bits, i.const(~(ones << fraction)))
    mantissa = i.convert("bitcast", i.op("or", kept, i.const(bias - 1 << fraction)), w.element)
    odd = e.op(
        f"or {w.bits} {(a := w.compare('oeq', value, w.const(0)))}, {(b := i.compare('eq', field, i.const(ones)))}",
        a,
        b,
    )
    return w.select(odd, value, mantissa), i.select(odd, i.const(0), exponent)


@row("frexp_mantissa", takes=is_float)
def frexp_mantissa(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    return _frexp(e, dtype, lanes, value)[0]


@row("frexp_exponent", takes=is_float)
def frexp_exponent(e: Emission, dtype: torch.dtype, lanes: int, value: str) -> str:
    """As i32."""
    found = _frexp(e, dtype, lanes, value)[1]
    return found if dtype is torch.float32 else Words(e, "i64", lanes).convert("trunc", found, "i32")
