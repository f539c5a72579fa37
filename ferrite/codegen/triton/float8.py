"""Floats of 8 bits in Triton: they are their bits, and are widened and rounded by hand.

The conversions of Triton and of the hardware saturate, and not every GPU has them for every type; torch rounds to
nearest, ties to even, and what is too large is infinite where the type has infinities, else no number, or, in newer
versions, the greatest number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferrite.capture import on_real_tensors


@dataclass(frozen=True)
class Float8:
    """One of the types: a sign, an exponent with this `bias`, and `digits` bits of fraction make a code of 8 bits.

    `largest`: the greatest code of a number, or of infinity. `nan`: the code of what is no number. `saturates`: whether
    what is too large becomes the largest; else it is no number. `has_negative_zero`: without, its code is the only NaN.
    """

    name: str
    digits: int
    bias: int
    largest: int
    nan: int
    saturates: bool
    has_negative_zero: bool = True

    @property
    def has_infinity(self) -> bool:
        return self.largest == 0x7C

    def widening(self) -> str:
        """The bits are put where those of a float of 32 bits are. The exponent, which has another bias there, is moved
        by a multiplication: that is exact, and makes subnormal numbers normal."""
        odd = f"code == {self.nan}" if not self.has_negative_zero else f"size > {self.largest}"
        infinity = f'tl.where(size == {self.largest}, float("inf"), number)' if self.has_infinity else "number"
        return f"""
def from_{self.name}(value):
    code = tl.cast(value, tl.int32)
    size = code & 127
    number = tl.cast(size << {23 - self.digits}, tl.float32, bitcast=True) * {2.0 ** (127 - self.bias)!r}
    number = {infinity}
    number = tl.where(code >= 128, number * (-1.0), number)
    return tl.where({odd}, float("nan"), number)
"""

    def rounding(self) -> str:
        """Numbers that are normal here are rounded as integers: half of what is cut off is added, less one where the
        last digit that stays is even. To smaller ones, which are subnormal here, a power of two is added whose last bit
        is worth as much as theirs: so the addition rounds them, and its last bits are their code."""
        shift = 23 - self.digits
        smallest_normal = (128 - self.bias) << 23
        exponent = 24 - self.bias - self.digits
        power, power_bits = 2.0**exponent, (exponent + 127) << 23
        signed = (
            "code | sign"
            if self.has_negative_zero
            else f"tl.where(code == 0, 0, tl.where(code == {self.nan}, code, code | sign))"
        )
        if self.saturates:
            large = f"tl.where(bits > {0x7F800000}, {self.nan}, tl.minimum(code, {self.largest}))"
        else:
            large = f"tl.where((code > {self.largest}) | (bits > {0x7F800000}), {self.nan}, code)"
        return f"""
def to_{self.name}(value):
    word = tl.cast(value, tl.int32, bitcast=True)
    sign = (word >> 24) & 128
    bits = word & {0x7FFFFFFF}
    rounded = (bits + {(1 << (shift - 1)) - 1} + ((bits >> {shift}) & 1)) >> {shift}
    rounded = rounded - {(127 - self.bias) << self.digits}
    small = tl.cast(tl.abs(value) + {power!r}, tl.int32, bitcast=True) - {power_bits}
    code = tl.where(bits < {smallest_normal}, small, rounded)
    code = {large}
    return tl.cast({signed}, tl.uint8)
"""


def saturates(dtype: torch.dtype) -> bool:
    """What torch makes of a number that is too large depends on its version."""
    with on_real_tensors():
        return not bool(torch.tensor(1e6).to(dtype).float().isnan())


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_E4M3_ONE_ZERO, _E5M2_ONE_ZERO = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
FORMATS = {
    _E4M3: Float8("float8_e4m3", 3, 7, 0x7E, 0x7F, saturates(_E4M3)),
    _E5M2: Float8("float8_e5m2", 2, 15, 0x7C, 0x7F, saturates=True),
    _E4M3_ONE_ZERO: Float8(
        "float8_e4m3_one_zero", 3, 8, 0x7F, 0x80, saturates(_E4M3_ONE_ZERO), has_negative_zero=False
    ),
    _E5M2_ONE_ZERO: Float8(
        "float8_e5m2_one_zero", 2, 16, 0x7F, 0x80, saturates(_E5M2_ONE_ZERO), has_negative_zero=False
    ),
}
CONVERSIONS = tuple(text for each in FORMATS.values() for text in (each.widening(), each.rounding()))
