"""Element types: their short names, and values by their bits.

>>> bits_of(-0.0, torch.float32), short(torch.bfloat16)
(2147483648, 'bf16')
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from ferrite.graph import SHORT_NAMES

# As in descriptions of graphs, but a truth value says its size, and the rarer types have names too.
SHORT = {
    **SHORT_NAMES,
    torch.bool: "b8",
    torch.complex32: "c32",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3z",
    torch.float8_e5m2fnuz: "f8e5m2z",
    torch.float8_e8m0fnu: "f8e8m0",
}
LONG = {name: dtype for dtype, name in SHORT.items()}
NARROW = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def short(dtype: torch.dtype) -> str:
    return SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def arithmetic_type(dtype: torch.dtype) -> torch.dtype:
    """The type arithmetic on these elements is done in: 16-bit floats are widened."""
    return NARROW.get(dtype, dtype)


# How a type is packed, where Python's struct knows it.
_FORMATS = {
    torch.float64: "<d",
    torch.float32: "<f",
    torch.float16: "<e",
}
# Of the two parts of a complex number.
PART_TYPES = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


def foldable(dtype: torch.dtype) -> bool:
    """Whether `bits_of` and `value_of` know a type."""
    return dtype in _FORMATS or dtype in PART_TYPES or dtype is torch.bfloat16 or is_integer(dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Integers and bool."""
    return not dtype.is_floating_point and not dtype.is_complex


def bits_of(value: bool | int | float | complex, dtype: torch.dtype) -> int:
    """The bits of a number in a type: rounded to nearest, integers wrapped, as a conversion in eager does.

    Plain Python, since a lowering may run while torch is tracing.
    """
    if dtype is torch.bool:
        return int(bool(value))
    if dtype in PART_TYPES:
        part, number = PART_TYPES[dtype], complex(value)
        return bits_of(number.real, part) | bits_of(number.imag, part) << (8 * part.itemsize)
    if is_integer(dtype):
        assert not isinstance(value, complex)
        return int(value) & ((1 << (8 * dtype.itemsize)) - 1)
    assert not isinstance(value, complex)
    if dtype is torch.bfloat16:
        return _rounded_to_half_word(bits_of(float(value), torch.float32))
    return _packed(float(value), _FORMATS[dtype])


def _packed(value: float, form: str) -> int:
    try:
        return int.from_bytes(struct.pack(form, value), "little")
    except OverflowError:
        return int.from_bytes(struct.pack(form, math.copysign(math.inf, value)), "little")


def _rounded_to_half_word(bits: int) -> int:
    """The upper half of a 32-bit float, to nearest, ties to even; a NaN stays one."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def value_of(bits: int, dtype: torch.dtype) -> Any:
    """The Python number with these bits; a NaN loses what else it carries."""
    if dtype is torch.bool:
        return bool(bits)
    if dtype in PART_TYPES:
        part = PART_TYPES[dtype]
        width = 8 * part.itemsize
        return complex(value_of(bits & ((1 << width) - 1), part), value_of(bits >> width, part))
    if is_integer(dtype):
        width = 8 * dtype.itemsize
        return bits - (1 << width) if dtype.is_signed and bits >> (width - 1) else bits
    if dtype is torch.bfloat16:
        return value_of(bits << 16, torch.float32)
    return struct.unpack(_FORMATS[dtype], bits.to_bytes(dtype.itemsize, "little"))[0]


def tensor_of(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without dimensions that holds these bits."""
    raw = list(bits.to_bytes(dtype.itemsize, "little"))
    return torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(())
