"""Random numbers by counting: the same bits as `ferrite.ir.random`, for all lanes at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ferrite.codegen.llvm.casts import converted
from ferrite.codegen.llvm.emission import Emission, Value
from ferrite.codegen.llvm.operators import Words
from ferrite.codegen.llvm.types import REGISTER
from ferrite.errors import NotGenerated
from ferrite.ir import DIGITS, KEY_STEPS, MULTIPLIERS, ROUNDS, WORD

WORDS = 4  # in a block


def random_value(e: Emission, kind: str, seed: Value, counter: Value, stream: Value, dtype: torch.dtype) -> Value:
    """Number `counter` of a stream of `seed`, all of them i64."""
    given = [seed, counter, stream]
    return e.map(REGISTER[dtype], given, lambda lanes, *parts: _Stream(e, lanes, *parts).number(kind, dtype))


def random_row(e: Emission, seed: Value, firsts: list[str], stream: Value, dtype: torch.dtype) -> Value:
    """Uniform numbers for lanes that count on from a multiple of four: every block is drawn once, for four lanes.

    `firsts`: the number (i64) of the first lane in every copy."""
    parts = []
    for row, first in enumerate(firsts):
        words: list[str] = []
        for place in range(0, e.lanes, WORDS):
            counter = first if place == 0 else e.op(f"add nsw i64 {first}, {place}", first)
            key, number = (e.part(each, row, len(firsts), 1) for each in (seed, stream))
            numbers = _Stream(e, 1, key, counter, number)
            words += numbers.words(numbers.wide.op("lshr", numbers.counter, numbers.wide.const(2)))
        parts.append(_unit(e, e.lanes, e.gathered(words, "i32"), dtype))
    return Value(tuple(parts), REGISTER[dtype], e.lanes)


def _unit(e: Emission, lanes: int, word: str, dtype: torch.dtype) -> str:
    """A word as a number from 0 to below 1, with as many digits as its type holds."""
    digits, real, whole = DIGITS[dtype], Words(e, "float", lanes), Words(e, "i32", lanes)
    kept = whole.op("lshr", word, whole.const(32 - digits))
    scaled = real.op("fmul", whole.convert("uitofp", kept, "float"), real.const(2.0**-digits))
    return converted(e, scaled, lanes, torch.float32, dtype)


class _Stream:
    def __init__(self, e: Emission, lanes: int, seed: str, counter: str, stream: str) -> None:
        self.e, self.lanes, self.counter = e, lanes, counter
        self.wide, self.word = Words(e, "i64", lanes), Words(e, "i32", lanes)
        self.key = self.halves(seed)
        self.stream = self.halves(stream)

    def number(self, kind: str, dtype: torch.dtype) -> str:
        wide = self.wide
        if kind not in ("uniform", "bits"):
            raise NotGenerated(f"random numbers of kind {kind}")
        if kind == "uniform" and dtype is not torch.float64:
            within = self.word_of(wide.op("and", self.counter, wide.const(WORDS - 1)))
            return _unit(self.e, self.lanes, self.drawn(wide.op("lshr", self.counter, wide.const(2)))(within), dtype)
        block = self.drawn(wide.op("lshr", self.counter, wide.const(1)))  # two words each
        within = self.word_of(wide.op("shl", wide.op("and", self.counter, wide.const(1)), wide.const(1)))
        first, second = block(within), block(self.word.op("add", within, self.word.const(1)))
        if kind == "uniform":
            real = Words(self.e, "double", self.lanes)
            high = wide.op("shl", self.widened(self.word.op("lshr", first, self.word.const(5))), wide.const(26))
            total = wide.op("add", high, self.widened(self.word.op("lshr", second, self.word.const(6))))
            return real.op("fmul", wide.convert("sitofp", total, "double"), real.const(2.0**-53))
        high = wide.op("shl", self.widened(first), wide.const(31))
        bits = wide.op("add", high, self.widened(self.word.op("lshr", second, self.word.const(1))))
        return converted(self.e, bits, self.lanes, torch.int64, dtype)

    def drawn(self, block: str) -> Callable[[str], str]:
        """The four words of a block, as a choice by number."""
        words = self.words(block)

        def choose(within: str) -> str:
            chosen = words[3]
            for number in range(3):
                hit = self.word.compare("eq", within, self.word.const(number))
                chosen = self.word.select(hit, words[number], chosen)
            return chosen

        return choose

    def words(self, block: str) -> tuple[str, ...]:
        return self.philox((*self.halves(block), *self.stream))

    def philox(self, counter: tuple[str, ...]) -> tuple[str, ...]:
        first, second, third, fourth = counter
        left, right = self.key
        for _ in range(ROUNDS):
            (low, low_up), (high, high_up) = self.product(first, MULTIPLIERS[0]), self.product(third, MULTIPLIERS[1])
            first, second, third, fourth = self.xor(high_up, second, left), high, self.xor(low_up, fourth, right), low
            left, right = self.stepped(left, KEY_STEPS[0]), self.stepped(right, KEY_STEPS[1])
        return first, second, third, fourth

    def product(self, value: str, factor: int) -> tuple[str, str]:
        """Both halves of a product."""
        whole = self.wide.op("mul", self.widened(value), self.wide.const(factor))
        return self.word_of(whole), self.word_of(self.wide.op("lshr", whole, self.wide.const(32)))

    def xor(self, *values: str) -> str:
        return self.word.op("xor", self.word.op("xor", values[0], values[1]), values[2])

    def stepped(self, key: str, step: int) -> str:
        return self.word.op("add", key, self.word.const(step - (WORD + 1)))

    def halves(self, value: str) -> tuple[str, str]:
        return self.word_of(value), self.word_of(self.wide.op("lshr", value, self.wide.const(32)))

    def word_of(self, value: str) -> str:
        return self.wide.convert("trunc", value, "i32")

    def widened(self, value: str) -> str:
        return self.word.convert("zext", value, "i64")
