"""Types and literals of LLVM text.

In registers a bool is i1, and the narrow floats are their bits: they are moved and converted, and nothing else.
"""

from __future__ import annotations

import functools
import struct

import torch

from ferrite.ir import is_integer

REGISTER = {
    torch.bool: "i1",
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "i16",
    torch.bfloat16: "i16",
    **dict.fromkeys((torch.int8, torch.uint8), "i8"),
    **dict.fromkeys((torch.int16, torch.uint16), "i16"),
    **dict.fromkeys((torch.int32, torch.uint32), "i32"),
    **dict.fromkeys((torch.int64, torch.uint64), "i64"),
}
MEMORY = {**REGISTER, torch.bool: "i8"}
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8, "ptr": 8}
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64}
INTEGER_OF = {"float": "i32", "double": "i64"}
SUFFIX = {"float": "f32", "double": "f64", "i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64"}


def vector(element: str, lanes: int) -> str:
    return element if lanes == 1 else f"<{lanes} x {element}>"


def suffix(element: str, lanes: int) -> str:
    """How the name of an intrinsic ends."""
    return SUFFIX[element] if lanes == 1 else f"v{lanes}{SUFFIX[element]}"


def is_literal(name: str) -> bool:
    return name[0] != "%"


@functools.lru_cache(maxsize=4096)
def literal(bits: int, dtype: torch.dtype) -> str:
    """A constant by its bits. 16-bit floats are their bits already."""
    element = REGISTER[dtype]
    if element == "i1":
        return "true" if bits else "false"
    if element == "float":
        return float_literal(bits)
    if element == "double":
        return f"0x{bits:016X}"
    width = 8 * dtype.itemsize
    return str(bits - (1 << width) if bits >> (width - 1) else bits)


def float_literal(bits: int) -> str:
    """LLVM writes a float as the double that it is; a NaN keeps its bits."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return f"0x{bits >> 31 << 63 | 0x7FF << 52 | fraction << 29:016X}"
    value = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def number(value: float, element: str) -> str:
    """A number as a literal of a type in registers."""
    if element == "float":
        return float_literal(int.from_bytes(struct.pack("<f", value), "little"))
    if element == "double":
        return f"0x{int.from_bytes(struct.pack('<d', value), 'little'):016X}"
    return str(int(value))


def is_signed(dtype: torch.dtype) -> bool:
    return is_integer(dtype) and dtype is not torch.bool and dtype.is_signed


def is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)
