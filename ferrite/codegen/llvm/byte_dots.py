"""Sums of products of bytes, four at a time: words of 32 bits, each with four bytes.

    total = total + dot_u8s8(a, b)          vpdpbusd total, a, b            x86 with VNNI
    total = total + dot_s8s8(a, b)          sdot     total, a, b            Arm with dot products

Elsewhere x86 multiplies 16 bits and adds pairs (`pmaddwd`): even bytes, then odd ones, where no pair overflows. What is
left multiplies byte by byte, in 32 bits.
"""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.emission import Emission
from ferrite.codegen.llvm.operators import Words, row
from ferrite.codegen.llvm.types import vector
from ferrite.ir import DOTS

# By how many words there are, as LLVM names them.
VNNI = {4: "x86.avx512.vpdpbusd.128", 8: "x86.avx512.vpdpbusd.256", 16: "x86.avx512.vpdpbusd.512"}
PAIRS = {4: "x86.sse2.pmadd.wd", 8: "x86.avx2.pmadd.wd", 16: "x86.avx512.pmaddw.d.512"}


@row("pack_bytes", takes=lambda dtype: dtype in (torch.int8, torch.uint8))
def pack_bytes(e: Emission, dtype: torch.dtype, lanes: int, *four: str) -> str:
    """Bytes that lie side by side are loaded as a word: see `Expressions`."""
    wide = Words(e, "i32", lanes)
    word, *rest = (Words(e, "i8", lanes).convert("zext", each, "i32") for each in four)
    for place, each in enumerate(rest, 1):
        word = wide.op("or", word, wide.op("shl", each, wide.const(8 * place)))
    return word


def _dot(name: str) -> None:
    @row(name, takes=lambda dtype: dtype is torch.int32)
    def make(e: Emission, dtype: torch.dtype, lanes: int, left: str, right: str) -> str:
        return dot_added(e, name, lanes, Words(e, "i32", lanes).const(0), left, right)


for _name in DOTS:
    _dot(_name)


def dot_added(e: Emission, name: str, lanes: int, total: str, left: str, right: str) -> str:
    """A total, and what an operator of `DOTS` makes of two words."""
    processor, is_unsigned = e.processor, name == "dot_u8s8"
    type_ = vector("i32", lanes)
    if processor.byte_dots == "vnni" and is_unsigned and lanes in VNNI and lanes <= processor.lanes:
        return called(e, VNNI[lanes], type_, (type_, total), (type_, left), (type_, right))
    if processor.byte_dots == "dotprod" and not is_unsigned and lanes == 4:
        sixteen = [("<16 x i8>", e.op(f"bitcast {type_} {each} to <16 x i8>", each)) for each in (left, right)]
        return called(e, "aarch64.neon.sdot.v4i32.v16i8", type_, (type_, total), *sixteen)
    words = Words(e, "i32", lanes)
    if processor.triple.startswith("x86_64") and lanes in PAIRS and lanes <= processor.lanes:
        for pair in by_pairs(e, lanes, is_unsigned, left, right):
            total = words.op("add", total, pair)
        return total
    for place in range(4):
        product = words.op("mul", byte_at(words, left, place, is_unsigned), byte_at(words, right, place, False))
        total = words.op("add", total, product)
    return total


def by_pairs(e: Emission, lanes: int, is_unsigned: bool, left: str, right: str) -> list[str]:
    """The products of even bytes, and of odd ones, two and two added up."""
    halves = Words(e, "i16", 2 * lanes)
    type_, pair_type = vector("i32", lanes), halves.type
    left, right = (e.op(f"bitcast {type_} {each} to {pair_type}", each) for each in (left, right))
    eight = halves.const(8)
    shift = "lshr" if is_unsigned else "ashr"
    even = (
        halves.op(shift, halves.op("shl", left, eight), eight),
        halves.op("ashr", halves.op("shl", right, eight), eight),
    )
    odd = halves.op(shift, left, eight), halves.op("ashr", right, eight)
    return [called(e, PAIRS[lanes], type_, *((pair_type, each) for each in pair)) for pair in (even, odd)]


def byte_at(words: Words, word: str, place: int, is_unsigned: bool) -> str:
    top = words.op("shl", word, words.const(24 - 8 * place)) if place < 3 else word
    return words.op("lshr" if is_unsigned else "ashr", top, words.const(24))


def called(e: Emission, name: str, result: str, *operands: tuple[str, str]) -> str:
    """A function of LLVM's for some processors."""
    e.declare(f"declare {result} @llvm.{name}({', '.join(type_ for type_, _ in operands)})")
    given = ", ".join(f"{type_} {operand}" for type_, operand in operands)
    return e.op(f"call {result} @llvm.{name}({given})", *(operand for _, operand in operands))
