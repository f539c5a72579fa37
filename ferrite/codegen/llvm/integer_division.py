"""Division, remainders, powers and divisors of numbers.

Dividing an integer by zero stops the kernel, as eager raises; no instruction ever traps.
"""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.casts import converted
from ferrite.codegen.llvm.checks import DIVISION, stop_where
from ferrite.codegen.llvm.emission import Emission
from ferrite.codegen.llvm.math.calls import function
from ferrite.codegen.llvm.operators import Words, is_float, is_whole, row, words
from ferrite.codegen.llvm.types import BITS, REGISTER, is_literal, is_signed


def divided(
    e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str, mask: str | None
) -> tuple[str, str, str]:
    """Quotient toward zero, its remainder, and the divisor that was used: 1 where there is none."""
    w = words(e, dtype, lanes)
    signed = is_signed(dtype)
    plain = right.removeprefix(f"splat ({w.element} ").removesuffix(")")
    if is_literal(plain) and plain not in ("0", "-1"):
        return w.op("sdiv" if signed else "udiv", left, right), w.op("srem" if signed else "urem", left, right), right
    zero = w.compare("eq", right, w.const(0))
    bad = zero if mask is None else e.op(f"and {w.bits} {zero}, {mask}", zero, mask)
    stop_where(e, bad, lanes, DIVISION)
    divisor = w.select(zero, w.const(1), right)
    if not signed:
        return w.op("udiv", left, divisor), w.op("urem", left, divisor), divisor
    minus = w.compare("eq", right, w.const(-1))  # the quotient of the least integer wraps
    used = w.select(minus, w.const(1), divisor)
    quotient = w.select(minus, w.op("sub", w.const(0), left), w.op("sdiv", left, used))
    return quotient, w.op("srem", left, used), divisor


def _below(w: Words, rest: str, divisor: str) -> str:
    """Whether a remainder has to be moved to the sign of the divisor."""
    apart = w.compare("slt", w.op("xor", rest, divisor), w.const(0))
    some = w.compare("ne", rest, w.const(0))
    return w.e.op(f"and {w.bits} {apart}, {some}", apart, some)


@row("trunc_divide")
def trunc_divide(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str, mask: str | None = None) -> str:
    if is_float(dtype):
        w = words(e, dtype, lanes)
        return w.call("trunc", w.op("fdiv", left, right))
    return divided(e, dtype, lanes, left, right, mask)[0]


@row("floor_divide")
def floor_divide(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str, mask: str | None = None) -> str:
    if is_float(dtype):
        return _floor_divided(e, dtype, lanes, left, right)
    quotient, rest, divisor = divided(e, dtype, lanes, left, right, mask)
    if not is_signed(dtype):
        return quotient
    w = words(e, dtype, lanes)
    return w.op("add", quotient, w.as_type("i1").convert("sext", _below(w, rest, divisor), w.element))


def _floor_divided(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
    """By the exact remainder: the quotient alone may round up to the next integer."""
    w = words(e, dtype, lanes)
    zero = w.const(0)
    rest = function(e, "fmod", dtype, lanes, left, right)
    plain = w.op("fdiv", w.op("fsub", left, rest), right)
    some = w.compare("une", rest, zero)
    below, under = w.compare("olt", right, zero), w.compare("olt", rest, zero)
    apart = e.op(f"xor {w.bits} {below}, {under}", below, under)
    moved = e.op(f"and {w.bits} {some}, {apart}", some, apart)
    plain = w.select(moved, w.op("fsub", plain, w.const(1)), plain)
    whole = w.call("floor", plain)
    up = w.compare("ogt", w.op("fsub", plain, whole), w.const(0.5))
    whole = w.select(up, w.op("fadd", whole, w.const(1)), whole)
    exact = w.op("fdiv", left, right)
    found = w.select(w.compare("une", plain, zero), whole, w.call("copysign", zero, exact))
    return w.select(w.compare("oeq", right, zero), exact, found)


@row("remainder")
def remainder(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str, mask: str | None = None) -> str:
    w = words(e, dtype, lanes)
    if not is_float(dtype):
        _, rest, divisor = divided(e, dtype, lanes, left, right, mask)
        if not is_signed(dtype):
            return rest
        return w.select(_below(w, rest, divisor), w.op("add", rest, divisor), rest)
    rest, zero = function(e, "fmod", dtype, lanes, left, right), w.const(0)
    some, below, under = w.compare("une", rest, zero), w.compare("olt", right, zero), w.compare("olt", rest, zero)
    apart = e.op(f"xor {w.bits} {below}, {under}", below, under)
    moved = e.op(f"and {w.bits} {some}, {apart}", some, apart)
    return w.select(moved, w.op("fadd", rest, right), rest)


@row("fmod")
def fmod(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str, mask: str | None = None) -> str:
    if is_float(dtype):
        return function(e, "fmod", dtype, lanes, left, right)
    return divided(e, dtype, lanes, left, right, mask)[1]


# --- loops of their own -----------------------------------------------------------------------------------------------

POWER = """
define internal {t} @ferrite_power_{s}({t} %base, {t} %exponent) nounwind {{
entry:
  %negative = icmp {less} {t} %exponent, 0
  br i1 %negative, label %inverse, label %again
inverse:
  %one = icmp eq {t} %base, 1
  %minus = icmp eq {t} %base, -1
  %odd = trunc {t} %exponent to i1
  %sign = select i1 %odd, {t} -1, {t} 1
  %unit = select i1 %minus, {t} %sign, {t} 0
  %inverted = select i1 %one, {t} 1, {t} %unit
  ret {t} %inverted
again:
  %result = phi {t} [ 1, %entry ], [ %following, %again ]
  %square = phi {t} [ %base, %entry ], [ %squared, %again ]
  %left = phi {t} [ %exponent, %entry ], [ %halved, %again ]
  %bit = trunc {t} %left to i1
  %more = mul {t} %result, %square
  %following = select i1 %bit, {t} %more, {t} %result
  %squared = mul {t} %square, %square
  %halved = lshr {t} %left, 1
  %done = icmp eq {t} %halved, 0
  br i1 %done, label %leave, label %again
leave:
  ret {t} %following
}}
"""
DIVISOR = """
define internal {t} @ferrite_divisor_{s}({t} %left, {t} %right) nounwind {{
entry:
  %none = icmp eq {t} %left, 0
  br i1 %none, label %leave, label %again
again:
  %a = phi {t} [ %left, %entry ], [ %rest, %again ]
  %b = phi {t} [ %right, %entry ], [ %a, %again ]
  %trap = icmp eq {t} %a, {trap}
  %used = select i1 %trap, {t} 1, {t} %a
  %rest = {rem} {t} %b, %used
  %done = icmp eq {t} %rest, 0
  br i1 %done, label %leave, label %again
leave:
  %found = phi {t} [ %right, %entry ], [ %a, %again ]
  ret {t} %found
}}
"""


def by_lanes(w: Words, name: str, *operands: str) -> str:
    """A scalar function of ours, lane by lane."""
    found = []
    for lane in range(w.lanes):
        given = [w.e.lane(operand, w.element, w.lanes, lane) for operand in operands]
        text = f"call {w.element} {name}({', '.join(f'{w.element} {item}' for item in given)})"
        found.append(w.e.op(text, *given))
    return w.e.gathered(found, w.element)


@row("pow", takes=lambda dtype: is_float(dtype) or is_whole(dtype))
def power(e: Emission, dtype: torch.dtype, lanes: int, base: str, exponent: str) -> str:
    if is_float(dtype):
        return function(e, "pow", dtype, lanes, base, exponent)
    w = words(e, dtype, lanes)
    kind = f"{'s' if is_signed(dtype) else 'u'}{BITS[w.element]}"
    e.module.helpers[f"power {kind}"] = POWER.format(t=w.element, s=kind, less="slt" if is_signed(dtype) else "ult")
    return by_lanes(w, f"@ferrite_power_{kind}", base, exponent)


def _divisor(w: Words, dtype: torch.dtype, left: str, right: str) -> str:
    """By signed remainders: the least integer has no magnitude, and what eager makes of it we make too."""
    signed = is_signed(dtype)
    kind = f"{'s' if signed else 'u'}{BITS[w.element]}"
    words_ = {"rem": "srem", "trap": "-1"} if signed else {"rem": "urem", "trap": "0"}
    w.e.module.helpers[f"divisor {kind}"] = DIVISOR.format(t=w.element, s=kind, **words_)
    return by_lanes(w, f"@ferrite_divisor_{kind}", left, right)


def _magnitude(w: Words, dtype: torch.dtype, value: str) -> str:
    return w.call("smax", value, w.op("sub", w.const(0), value)) if is_signed(dtype) else value


@row("gcd", takes=is_whole)
def gcd(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
    w = words(e, dtype, lanes)
    return _divisor(w, dtype, _magnitude(w, dtype, left), _magnitude(w, dtype, right))


@row("lcm", takes=is_whole)
def lcm(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
    """Small integers are multiplied as larger ones, and cut in the end."""
    shared = gcd(e, dtype, lanes, left, right)
    wide = dtype if BITS[REGISTER[dtype]] >= 32 else torch.int32
    w = words(e, wide, lanes)
    one, two, both = (converted(e, item, lanes, dtype, wide) for item in (left, right, shared))
    none = w.compare("eq", both, w.const(0))
    quotient = divided(e, wide, lanes, one, w.select(none, w.const(1), both), None)[0]
    multiple = w.select(none, w.const(0), _magnitude(w, wide, w.op("mul", quotient, two)))
    return converted(e, multiple, lanes, wide, dtype)
