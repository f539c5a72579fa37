"""Conversions of values, as eager does them on this machine, numbers that do not fit included."""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.emission import Emission, Value
from ferrite.codegen.llvm.operators import Words, is_float, words
from ferrite.codegen.llvm.types import BITS, REGISTER, is_narrow, is_signed

ARITHMETIC = torch.float32


def cast(e: Emission, value: Value, source: torch.dtype, target: torch.dtype) -> Value:
    return e.map(REGISTER[target], [value], lambda lanes, item: converted(e, item, lanes, source, target))


def converted(e: Emission, item: str, lanes: int, source: torch.dtype, target: torch.dtype) -> str:
    if source == target:
        return item
    if is_narrow(source):
        return converted(e, widen(e, item, lanes, source), lanes, ARITHMETIC, target)
    if is_narrow(target):
        return narrow(e, converted(e, item, lanes, source, ARITHMETIC), lanes, target)
    w = words(e, source, lanes)
    element = REGISTER[target]
    if target is torch.bool:
        return w.compare("une" if is_float(source) else "ne", item, w.const(0))
    if is_float(source):
        if is_float(target):
            return w.convert("fpext" if target is torch.float64 else "fptrunc", item, element)
        return float_to_integer(w, item, target)
    if is_float(target):
        return w.convert("sitofp" if is_signed(source) else "uitofp", item, element)
    if BITS[element] == BITS[w.element]:
        return item
    if BITS[element] < BITS[w.element]:
        return w.convert("trunc", item, element)
    return w.convert("sext" if is_signed(source) else "zext", item, element)


def float_to_integer(w: Words, item: str, target: torch.dtype) -> str:
    """Toward zero. What does not fit is as the machine has it: small integers are cut out of larger ones."""
    element = REGISTER[target]
    if target in (torch.uint32, torch.uint64) and w.e.processor.saturates:
        return saturated(w, item, element, "u")
    if target is torch.uint64:
        return by_upper_half(w, item)
    wide = "i64" if target in (torch.uint8, torch.uint32, torch.int64, torch.uint64) else "i32"
    found = saturated(w, item, wide, "s") if w.e.processor.saturates else least_outside(w, item, wide)
    return found if wide == element else w.as_type(wide).convert("trunc", found, element)


def saturated(w: Words, item: str, element: str, sign: str) -> str:
    made = w.as_type(element)
    suffixes = [f"v{w.lanes}" if w.lanes > 1 else ""] * 2
    name = f"@llvm.fpto{sign}i.sat.{suffixes[0]}{element}.{suffixes[1]}{'f32' if w.element == 'float' else 'f64'}"
    w.e.declare(f"declare {made.type} {name}({w.type})")
    return w.e.op(f"call {made.type} {name}({w.type} {item})", item)


def least_outside(w: Words, item: str, element: str) -> str:
    """The least integer for what does not fit, NaN too."""
    most = 2.0 ** (BITS[element] - 1)
    above, below = w.compare("oge", item, w.const(-most)), w.compare("olt", item, w.const(most))
    inside = w.e.op(f"and {w.bits} {above}, {below}", above, below)
    return w.convert("fptosi", w.select(inside, item, w.const(-most)), element)


def by_upper_half(w: Words, item: str) -> str:
    """To 64 bits without a sign, on a machine that converts to signed ones: what does not fit these is moved down by
    half the range before, and up after."""
    half = 2.0**63
    fits = w.compare("ult", item, w.const(half))  # what is no number is converted as it is
    moved = least_outside(w, w.select(fits, item, w.op("fsub", item, w.const(half))), "i64")
    whole = w.as_type("i64")
    return whole.op("xor", moved, whole.select(fits, whole.const(0), whole.const(-(1 << 63))))


# --- 16-bit floats ----------------------------------------------------------------------------------------------------


def widen(e: Emission, item: str, lanes: int, source: torch.dtype) -> str:
    """To 32 bits; exact."""
    half, word = Words(e, "i16", lanes), Words(e, "i32", lanes)
    if source is torch.bfloat16:
        return word.convert("bitcast", word.op("shl", half.convert("zext", item, "i32"), word.const(16)), "float")
    if e.processor.half:
        return e.op(
            f"fpext {_half(lanes)} {(h := half.convert('bitcast', item, 'half'))} to {Words(e, 'float', lanes).type}", h
        )
    return _widened_by_hand(e, item, lanes)


def narrow(e: Emission, item: str, lanes: int, target: torch.dtype) -> str:
    """From 32 bits, to nearest, ties to even; a NaN stays one."""
    wide, word = Words(e, "float", lanes), Words(e, "i32", lanes)
    if target is torch.float16:
        if not e.processor.half:
            return _narrowed_by_hand(e, item, lanes)
        if lanes == 1:
            # What is rounded twice, from 64 bits to 32 and to 16, LLVM may move into a `copysign` whose halves have
            # unequal widths, and call a function of a library to make them equal.
            e.declare("declare float @llvm.arithmetic.fence.f32(float)")
            item = e.op(f"call float @llvm.arithmetic.fence.f32(float {item})", item)
        half = e.op(f"fptrunc {wide.type} {item} to {_half(lanes)}", item)
        return e.op(f"bitcast {_half(lanes)} {half} to {Words(e, 'i16', lanes).type}", half)
    bits = wide.convert("bitcast", item, "i32")
    odd = word.op("and", word.op("lshr", bits, word.const(16)), word.const(1))
    rounded = word.op("lshr", word.op("add", bits, word.op("add", odd, word.const(0x7FFF))), word.const(16))
    nan = wide.compare("uno", item, item)
    return word.convert("trunc", word.select(nan, word.const(0x7FC0), rounded), "i16")


def _half(lanes: int) -> str:
    return "half" if lanes == 1 else f"<{lanes} x half>"


def _widened_by_hand(e: Emission, item: str, lanes: int) -> str:
    """The exponent is moved by a multiplication, which is exact and makes subnormal numbers normal."""
    wide, word = Words(e, "float", lanes), Words(e, "i32", lanes)
    bits = Words(e, "i16", lanes).convert("zext", item, "i32")
    sign = word.op("shl", word.op("and", bits, word.const(0x8000)), word.const(16))
    magnitude = word.op("and", bits, word.const(0x7FFF))
    placed = word.convert("bitcast", word.op("shl", magnitude, word.const(13)), "float")
    scaled = wide.convert("bitcast", wide.op("fmul", placed, wide.const(2.0**112)), "i32")
    special = word.op("or", word.op("shl", magnitude, word.const(13)), word.const(0x7F800000))
    finite = word.compare("ult", magnitude, word.const(0x7C00))
    return word.convert("bitcast", word.op("or", sign, word.select(finite, scaled, special)), "float")


def _narrowed_by_hand(e: Emission, item: str, lanes: int) -> str:
    """Adding a number whose last bit is the last bit that is kept lets the machine round."""
    wide, word = Words(e, "float", lanes), Words(e, "i32", lanes)
    bits = wide.convert("bitcast", item, "i32")
    sign = word.op("lshr", word.op("and", bits, word.const(-(1 << 31))), word.const(16))
    magnitude = word.op("and", bits, word.const(0x7FFFFFFF))
    positive = word.convert("bitcast", magnitude, "float")
    exponent = word.op("and", magnitude, word.const(0x7F800000))
    least = word.call("umax", exponent, word.const((127 - 14) << 23))
    magic = word.op("add", least, word.const(13 << 23))
    summed = wide.convert("bitcast", wide.op("fadd", positive, word.convert("bitcast", magic, "float")), "i32")
    fraction = word.op("sub", summed, magic)  # steps of the last kept bit above the magic number
    power = word.op("lshr", word.op("sub", least, word.const((127 - 14) << 23)), word.const(13))
    number = word.op("add", fraction, power)
    number = word.call("umin", number, word.const(0x7C00))
    large = word.compare("uge", magnitude, word.const((127 + 16) << 23))
    number = word.select(large, word.const(0x7C00), number)
    nan = word.compare("ugt", magnitude, word.const(0x7F800000))
    number = word.select(nan, word.const(0x7E00), number)
    return word.convert("trunc", word.op("or", sign, number), "i16")
