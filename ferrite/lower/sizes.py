"""From torch's symbolic sizes to index expressions: the one place where sympy is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from functools import reduce
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.errors import NotLowered
from ferrite.ir import ONE, Index, Number, Symbol, as_index, maximum, minimum, multiply, number, symbol
from ferrite.ir.program import differences


def constant_value(index: Index | int) -> int | None:
    """The number, where an index is one: 4 of `number(4)`, None of `s0 + 1`."""
    if isinstance(index, int):
        return index
    return index.value if isinstance(index, Number) else None


class UnknownSize(NotLowered):
    """A size that index expressions cannot say."""


class SymbolFacts:
    """What torch knows of single symbols in a number."""

    def __init__(self, value: torch.SymInt | torch.SymBool | torch.SymFloat) -> None:
        self.value = value
        self.range = size_facts.symbol_range(value)
        self.likely = size_facts.likely_value(value)


class Sizes:
    """Sizes of one graph as index expressions; each sympy expression is read once. What guards hold equal is one index:
    where `s0 // 4` is 1 in every call, it is 1 here."""

    def __init__(self) -> None:
        self.symbols: dict[str, Index] = {}  # a symbol, or what stands for it
        self._seen: dict[Any, Index] = {}
        self._equal: Mapping[Any, Any] | None = None  # what guards hold equal, once a symbolic size has been read
        self._ranges: Mapping[Any, tuple[int, int]] = {}  # what follows from that for single symbols
        self._example: Any = None  # a number that torch can be asked about
        self.computed: Callable[[torch.SymInt], Index] | None = None  # a size that only a scalar expression can say

    def index(self, value: int | torch.SymInt) -> Index:
        if isinstance(value, int):
            return number(value)
        expression = torch_api.expression(value)
        found = self._seen.get(expression)
        if found is None:
            found = self._seen[expression] = self.found(expression, value)
        return found

    def found(self, expression: Any, value: torch.SymInt) -> Index:
        try:
            return self.read(expression, SymbolFacts(value))
        except UnknownSize:
            if self.computed is None:
                raise
            return self.computed(value)

    def symbol(self, symbol: Any, value: torch.SymInt | torch.SymBool | torch.SymFloat) -> Symbol:
        """One of the symbols of a number."""
        found = self.read(symbol, SymbolFacts(value))
        assert isinstance(found, Symbol)
        return found

    def as_made(self, value: torch.SymInt, bound: Container[Symbol]) -> Index:
        """A number as it was made, where its symbols have values: a check of a fact must not rest on that fact."""
        try:
            made = self.read(size_facts.as_made(value), SymbolFacts(value))
        except UnknownSize:
            return self.index(value)
        return made if all(atom in bound for atom in made.atoms) else self.index(value)

    def indices(self, values: Any) -> tuple[Index, ...]:
        return tuple(map(self.index, values))

    def define(self, new: Symbol, meaning: Index) -> Index:
        """A symbol that torch made up for a size is this expression from now on."""
        self.symbols[new.name] = meaning
        self._seen.clear()
        return meaning

    def relations(self) -> tuple[Index, ...]:
        """What guards say of sizes together, and assertions, which are checked where the last of their symbols becomes
        known. None of these is negative."""
        if self._example is None:
            return ()
        found: dict[Index, None] = {}
        for comparison, left, right in size_facts.related(self._example):
            for expression in differences(comparison, left, right):
                with contextlib.suppress(UnknownSize):
                    found[self.read(expression, SymbolFacts(self._example))] = None
        return tuple(found)

    def read(self, expression: Any, facts: SymbolFacts) -> Index:
        if self._equal is None:
            self._equal = size_facts.guarded_equalities(facts.value)
            self._ranges = size_facts.guarded_ranges(facts.value, self._equal)
            self._example = facts.value
        expression = size_facts.simplest_equal(expression, self._equal) if self._equal else expression
        if expression.is_Integer:
            return number(int(expression))
        if expression.is_Symbol:
            name = str(expression)
            if name not in self.symbols:
                low, high = facts.range(expression)
                if expression in self._ranges:
                    first, last = self._ranges[expression]
                    low, high = max(low or 0, first), last if high is None else min(high, last)
                self.symbols[name] = symbol(name, low, high, facts.likely(expression))
            return self.symbols[name]
        if type(expression).__name__ == "Piecewise":
            return self.truth(expression, facts)
        make = RULES.get(type(expression).__name__)
        if make is None:
            raise UnknownSize(f"the size {expression} ({type(expression).__name__})")
        return make(*(self.read(part, facts) for part in expression.args))

    def truth(self, expression: Any, facts: SymbolFacts) -> Index:
        """One where a symbol that is one or zero is one: the symbol itself."""
        pieces = expression.args
        condition = pieces[0][1] if len(pieces) == 2 and (pieces[0][0], pieces[1][0]) == (1, 0) else None
        sides: tuple[Any, ...] = getattr(condition, "args", ())
        if type(condition).__name__ == "Equality" and sides[1] == 1:
            found = self.read(sides[0], facts)
            if (found.low, found.high) == (0, 1):
                return found
        raise UnknownSize(f"the size {expression}")


def _power(base: Index, exponent: Index) -> Index:
    times = getattr(exponent, "value", -1)
    if times < 0:
        raise UnknownSize(f"the size {base} to the power {exponent}")
    return reduce(multiply, [base] * times, as_index(ONE))


def _divided(top: Index, bottom: Index) -> Index:
    """Rounded down. Index expressions divide by what is positive: a negative divisor (`arange(9, 0, -n)`) is turned
    round, and one of either sign is left to scalar expressions."""
    if bottom.high is not None and bottom.high < 0:
        return -top // -bottom
    return top // of_known_sign(bottom)


def _remainder(top: Index, bottom: Index) -> Index:
    """What is left over, with the sign of the divisor."""
    if bottom.high is not None and bottom.high < 0:
        return -(-top % -bottom)
    return top % of_known_sign(bottom)


def of_known_sign(bottom: Index) -> Index:
    if bottom.low is None or bottom.low < 0:
        raise UnknownSize(f"a division by {bottom}, whose sign nobody knows")
    return bottom


RULES: dict[str, Callable[..., Index]] = {
    "Add": lambda *parts: reduce(lambda left, right: left + right, parts),
    "Mul": lambda *parts: reduce(multiply, parts),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": _divided,
    "CleanDiv": _divided,
    "CeilDiv": lambda top, bottom: -_divided(-top, bottom),
    "Mod": _remainder,
    "PythonMod": _remainder,
    "Min": minimum,
    "Max": maximum,
}
