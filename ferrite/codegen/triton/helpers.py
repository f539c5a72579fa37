"""Small Triton functions that the source of a kernel calls; those that it uses are printed before it.

They take numbers and blocks of them: Triton makes no difference.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from ferrite.codegen.triton.float8 import CONVERSIONS
from ferrite.codegen.triton.gamma import TWO_ARGUMENTS
from ferrite.codegen.triton.orthogonal import ORTHOGONAL_POLYNOMIALS
from ferrite.codegen.triton.special_functions import SPECIAL_FUNCTIONS
from ferrite.ir import KEY_STEPS, MULTIPLIERS, ROUNDS

HELPERS: dict[str, str] = {}


def _helper(text: str) -> None:
    text = inspect.cleandoc(text)
    found = re.match(r"def (\w+)", text)
    assert found is not None
    HELPERS[found[1]] = text


def functions(names: Iterable[str]) -> list[str]:
    """The text of these helpers and of those they call, callees first."""
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        for word in re.findall(r"\w+", HELPERS[name])[2:]:
            if word in HELPERS and word != name:
                add(word)
        ordered[name] = None

    for name in names:
        add(name)
    return [f"@triton.jit\n{HELPERS[name]}" for name in ordered]


# --- conversions ------------------------------------------------------------------------------------------------------
# Functions of their own, since Triton's interpreter rounds these towards zero, and loses the smallest.

_helper("""
    def to_bfloat16(value):
        return tl.cast(value, tl.bfloat16)
""")
_helper("""
    def from_bfloat16(value):
        return tl.cast(value, tl.float32)
""")

_helper("""
    def multiply_add(left, right, total):
        # a function of its own, since Triton's interpreter cannot multiply blocks of bfloat16
        return tl.dot(left, right, total)
""")
_helper("""
    def add_product(left, right, total):
        # all digits of 32 bits; the block is summed first: one long chain of sums would round as often as it is long.
        # With the last argument, which says something about floats of 8 bits alone, Triton leaves the sum as it stands
        return total + tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)
""")

_helper("""
    def larger(left, right):
        return tl.maximum(left, right)
""")
_helper("""
    def smaller(left, right):
        return tl.minimum(left, right)
""")
_helper("""
    def added(left, right):
        return left + right
""")

_helper("""
    def add_apart(left, right):
        # never one instruction with a product
        return libdevice.add_rn(left, right)
""")
_helper("""
    def subtract_apart(left, right):
        return libdevice.sub_rn(left, right)
""")

_helper("""
    def atomic_add_half(pointer, value, mask):
        # rounded at every step, as eager's; Triton's interpreter has none of 16 bits
        tl.atomic_add(pointer, value, mask=mask, sem="relaxed")
""")

# --- division ---------------------------------------------------------------------------------------------------------

_helper("""
    def floor_divide(top, bottom):
        # rounds down; Triton's own division rounds towards zero
        rest = top % bottom
        lower = (rest != 0) & ((rest < 0) != (bottom < 0))
        whole = top // bottom
        return tl.where(lower, whole - 1, whole)
""")
_helper("""
    def floor_modulo(top, bottom):
        # has the sign of the divisor
        rest = top % bottom
        lower = (rest != 0) & ((rest < 0) != (bottom < 0))
        return tl.where(lower, rest + bottom, rest)
""")
_helper("""
    def floor_modulo_float(top, bottom):
        rest = libdevice.fmod(top, bottom)
        return tl.where((rest != 0) & ((rest < 0) != (bottom < 0)), rest + bottom, rest)
""")
_helper("""
    def floor_divide_float(top, bottom, ratio):
        # by the remainder, so that 1 // 0.1 is 9; `ratio` is top / bottom, rounded
        rest = libdevice.fmod(top, bottom)
        lower = (rest != 0) & ((rest < 0) != (bottom < 0))
        whole = divide(top - rest, bottom)
        whole = tl.where(lower, whole - 1, whole)
        down = tl.floor(whole)
        down = tl.where(whole - down > 0.5, down + 1, down)
        down = tl.where(whole != 0, down, libdevice.copysign(whole * 0, ratio))
        return tl.where(bottom == 0, ratio, down)
""")
_helper("""
    def divide(top, bottom):
        # rounded to nearest: the plain operator is an approximation for 32 bits
        if top.dtype == tl.float32:
            return tl.div_rn(top, bottom)
        else:
            return top / bottom
""")
_helper("""
    def square_root(value):
        if value.dtype == tl.float32:
            return tl.sqrt_rn(value)
        else:
            return tl.sqrt(value)
""")

# --- for results of 16 bits -------------------------------------------------------------------------------------------
# Errors are below 2^-16 of the result: a hundredth of what rounding to bfloat16 costs, a tenth for float16.

# Parts of what is rounded to 16 bits: one instruction each, where the operators around them take six to handle numbers
# below 1e-38, which are zero here. Exponentials that one is added to, or that end in a factor, lose nothing by that.
_helper("""
    def quick_reciprocal(value):
        code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)
""")
_helper("""
    def quick_exp2(value):
        code: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)
""")
_helper("""
    def quick_exp(value):
        return quick_exp2(value * 1.44269504)
""")
_helper("""
    def quick_divide(top, bottom):
        # by a number that is not below one
        return top * quick_reciprocal(bottom)
""")
_helper("""
    def quick_sigmoid(value):
        return quick_reciprocal(1.0 + quick_exp2(value * (-1.44269504)))
""")
_helper("""
    def quick_tanh(value):
        # near zero by the series: there one is taken from what is nearly one
        near = value + value * (value * value * (-0.33333334))
        far = 1.0 - 2.0 * quick_reciprocal(1.0 + quick_exp2(value * 2.88539008))
        return tl.where(tl.abs(value) < 0.0625, near, far)
""")
_helper("""
    def quick_erf(value):
        # Abramowitz and Stegun, 7.1.26: off by 1.5e-7 at most; near zero by the series
        square = value * value
        near = value * (1.1283792 + square * (-0.37612638))
        size = tl.abs(value)
        part = quick_reciprocal(1.0 + 0.3275911 * size)
        sum_ = 1.4214138 + part * (-1.4531521 + part * 1.0614054)
        rest = part * (0.25482959 + part * (-0.28449674 + part * sum_)) * quick_exp2(square * (-1.44269504))
        far = tl.where(value < 0, rest - 1.0, 1.0 - rest)
        return tl.where(size < 0.0625, near, far)
""")

_helper("""
    def quick_ndtr(value):
        # by the same formula: the smaller side is what comes out of it, so that nothing cancels. Still off by 1e-7:
        # below 2e-4 that is more than rounding to bfloat16 costs, up to 1 % of what is far smaller still
        part = quick_reciprocal(1.0 + 0.23164189 * tl.abs(value))
        sum_ = 0.7107069 + part * (-0.72657603 + part * 0.5307027)
        power = quick_exp2(value * value * (-0.72134752))
        rest = part * (0.12741480 + part * (-0.14224837 + part * sum_)) * power
        return tl.where(value < 0, rest, 1.0 - rest)
""")
_helper("""
    def log_normal_distribution(value):
        # far below zero by the part of the complement that does not vanish
        scaled = value * 0.7071067811865476
        low = libdevice.log(libdevice.erfcx(scaled * (-1.0)) * 0.5) - value * value * 0.5
        high = libdevice.log1p(libdevice.erfc(scaled) * (-0.5))
        return tl.where(value < -1.0, low, high)
""")

for _text in (*CONVERSIONS, *SPECIAL_FUNCTIONS, *TWO_ARGUMENTS, *ORTHOGONAL_POLYNOMIALS):
    _helper(_text)

# --- lanes ------------------------------------------------------------------------------------------------------------

_helper("""
    def either_bits(left, right):
        # of lanes of which all but one are zero
        return left | right
""")

_helper("""
    def sort_lanes(values, dim: tl.constexpr):
        # a function of its own, since Triton's interpreter has no sort
        return tl.sort(values, dim)
""")

# --- shifts -----------------------------------------------------------------------------------------------------------

_helper("""
    def shift_left(value, count):
        # by as many bits as there are, or by a negative number: nothing remains
        inside = (count >= 0) & (count < value.dtype.primitive_bitwidth)
        return tl.where(inside, value << tl.where(inside, count, 0), 0)
""")
_helper("""
    def shift_right(value, count):
        # by as many bits as there are, or by a negative number: the sign remains
        last: tl.constexpr = value.dtype.primitive_bitwidth - 1
        inside = (count >= 0) & (count < last)
        return value >> tl.where(inside, count, last)
""")
_helper("""
    def shift_right_unsigned(value, count):
        inside = count < value.dtype.primitive_bitwidth
        return tl.where(inside, value >> tl.where(inside, count, 0), 0)
""")

# --- checks -----------------------------------------------------------------------------------------------------------

_helper("""
    def report(failure, number, value, extent, wrong):
        # the first lane that is wrong says what it saw; code for a GPU stops there, as eager's does
        place = tl.cast(value, tl.int64) * 0 + tl.cast(wrong, tl.int64) * 0
        turn = tl.atomic_add(failure + 3 + place, place + 1, mask=wrong, sem="relaxed")
        first = wrong & (turn == 0)
        tl.store(failure + place, place + number, mask=first)
        tl.store(failure + 1 + place, place + value, mask=first)
        tl.store(failure + 2 + place, place + extent, mask=first)
        tl.device_assert(~wrong, "index out of bounds")
""")

# --- random numbers ---------------------------------------------------------------------------------------------------

_helper(f"""
    def philox(first, second, third, fourth, left, right):
        for _ in tl.static_range({ROUNDS}):
            one = tl.full([], {MULTIPLIERS[0]}, tl.uint32)
            other = tl.full([], {MULTIPLIERS[1]}, tl.uint32)
            # products of 64 bits: dropout of 32768 x 1024 in bf16 takes 37.9 us, 41.4 with both halves by themselves
            wide = tl.cast(third, tl.uint64) * tl.cast(other, tl.uint64)
            wider = tl.cast(first, tl.uint64) * tl.cast(one, tl.uint64)
            high, low = tl.cast(wide >> 32, tl.uint32), tl.cast(wide, tl.uint32)
            far, near = tl.cast(wider >> 32, tl.uint32), tl.cast(wider, tl.uint32)
            first, second, third, fourth = high ^ second ^ left, low, far ^ fourth ^ right, near
            left = left + tl.full([], {KEY_STEPS[0]}, tl.uint32)
            right = right + tl.full([], {KEY_STEPS[1]}, tl.uint32)
        return first, second, third, fourth
""")
_helper("""
    def random_words(seed, stream, group):
        # the four words of 32 bits that come from one counter
        return philox(
            tl.cast(group, tl.uint32),
            tl.cast(group >> 32, tl.uint32),
            tl.cast(stream, tl.uint32),
            tl.cast(stream >> 32, tl.uint32),
            tl.cast(seed, tl.uint32),
            tl.cast(seed >> 32, tl.uint32),
        )
""")
_helper("""
    def random_word(seed, place, stream):
        # word `place` of 32 bits of a stream: blocks of four come from one counter
        seed = seed + place * 0 + stream * 0
        stream = stream + place * 0
        place = place + stream * 0
        within = place & 3
        first, second, third, fourth = random_words(seed, stream, place >> 2)
        even = tl.where(within == 0, first, third)
        odd = tl.where(within == 1, second, fourth)
        return tl.where((within & 1) == 0, even, odd)
""")
_helper("""
    def random_four(seed, place, stream):
        # of places that are multiples of four: four words side by side come from one counter
        seed = seed + place * 0
        stream = stream + place * 0
        first, second, third, fourth = random_words(seed, stream, place >> 2)
        word = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(word, [first.shape[0] * 4])
""")
_helper("""
    def random_float(word, digits: tl.constexpr):
        return tl.cast(word >> (32 - digits), tl.float32) * (2.0 ** -digits)
""")
_helper("""
    def curand_float(word):
        return tl.cast(word, tl.float32) * (2.0 ** -32) + (2.0 ** -33)
""")
_helper("""
    def random_double(seed, counter, stream):
        first = tl.cast(random_word(seed, counter * 2, stream), tl.int64)
        second = tl.cast(random_word(seed, counter * 2 + 1, stream), tl.int64)
        return tl.cast((first >> 5 << 26) + (second >> 6), tl.float64) * tl.full([], 2.0 ** -53, tl.float64)
""")
_helper("""
    def random_bits(seed, counter, stream):
        first = tl.cast(random_word(seed, counter * 2, stream), tl.int64)
        second = tl.cast(random_word(seed, counter * 2 + 1, stream), tl.int64)
        return (first << 31) + (second >> 1)
""")
