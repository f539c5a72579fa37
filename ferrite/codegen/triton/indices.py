"""Index arithmetic as Triton source.

Indices are mathematical integers; here they are 32 bits wide where bounds prove that no step leaves them, and 64
elsewhere. Where sizes are not known, the elsewhere has a name in the source, `INDEX`: code is made for 32 bits, and for
64 when sizes come of which the host sees that an index could leave 32 (`Reaches`). Triton divides towards zero, so a
dividend that may be negative goes through a helper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from ferrite.ir import (
    ONE,
    ZERO,
    Atom,
    Axis,
    Data,
    FloorDiv,
    Index,
    Max,
    Min,
    Mod,
    Number,
    Product,
    Sum,
    Symbol,
    maximum,
    minimum,
    number,
)

INDEX_LIMIT_IN_32_BITS = (1 << 31) - (1 << 14)  # room for the lanes of a block that lie beyond the extent
WIDE = "tl.int64"
INDEX = "INDEX"  # in the source: the type of indices that sizes decide about
Look = Callable[[Atom], tuple[str, bool]]  # the text of an atom, and whether it is surely 64 bits wide


def reach(index: Index) -> int | None:
    """The greatest magnitude that an index has."""
    return None if index.low is None or index.high is None else max(abs(index.low), abs(index.high))


def is_narrow(index: Index) -> bool:
    """Whether 32 bits hold it."""
    most = reach(index)
    return most is not None and most < INDEX_LIMIT_IN_32_BITS


def without(index: Index, symbols: Collection[Symbol]) -> Index:
    """What is left of an index, or of a sum, without these."""
    terms = index.terms if isinstance(index, Sum) else ((index, 1),)
    for item, factor in terms if symbols else ():
        if item in symbols:
            index = index - item * factor
    return index


def widened(text: str, to: str = WIDE) -> str:
    return f"tl.cast({text}, {to})"


class Reaches:
    """How far from zero indices are, and what comes up while they are computed, over the sizes of a kernel: `found` are
    numbers that none of it exceeds, where all is bounded."""

    def __init__(self, sizes: Collection[Symbol]) -> None:
        self.sizes = sizes
        self.found: dict[Index, None] = {}
        self.all_bounded = True

    @property
    def is_beyond(self) -> Index:
        """1 where some index could leave 32 bits, 0 where none can."""
        if not self.all_bounded:
            return ONE
        most = [
            each for each in self.found if not any(exceeds(other, each) for other in self.found if other is not each)
        ]
        return minimum(maximum(*most) // INDEX_LIMIT_IN_32_BITS, ONE) if most else ZERO

    def add(self, index: Index) -> Index:
        reach = self.of(index)
        self.found[reach] = None
        return reach

    def of(self, index: Index) -> Index:
        """No less than the magnitude of an index and of all its partial sums; what it divides is `found`."""
        match index:
            case Number():
                return number(abs(index.value))
            case Symbol() if index.low is not None and index.low >= 0:
                # other symbols count programs, of which there are never too many
                return index if index in self.sizes else ZERO
            case Axis() | Data():
                return self.of(index.extent)
            case Sum():
                terms = [self.of(item) * abs(factor) for item, factor in index.terms]
                return sum(terms, start=number(abs(index.constant)))
            case Product():
                return math.prod((maximum(self.of(factor), ONE) for factor in index.factors), start=ONE)
            case FloorDiv():
                top, bottom = self.add(index.top), self.add(index.bottom)
                return top // bottom + 1 if isinstance(index.bottom, Number) else top
            case Mod():
                self.add(index.top)
                return self.add(index.bottom)
            case Min() if all(item.low is not None and item.low >= 0 for item in index.items):
                reaches = [self.of(item) for item in index.items]
                return next((each for each in reaches if isinstance(each, Number)), minimum(*reaches))
            case Min() | Max():
                return maximum(*map(self.of, index.items))
        self.all_bounded = False
        return ZERO


def exceeds(one: Index, other: Index) -> bool:
    """Whether a sum of products of sizes surely is no less than another: each term of this is in one of that."""
    left = terms_of(one)
    for factors, count in terms_of(other):
        found = next((place for place, term in enumerate(left) if term[1] >= count and not factors - term[0]), None)
        if found is None:
            return False
        left.pop(found)
    return True


def terms_of(index: Index) -> list[tuple[Counter[Index], int]]:
    """Products as their factors, and how often they are added up. A factor is one at least."""
    terms = [*index.terms, (ONE, index.constant)] if isinstance(index, Sum) else [(index, 1)]
    found = []
    for item, count in terms:
        factors = item.factors if isinstance(item, Product) else [item]
        numbers = [each.value for each in factors if isinstance(each, Number)]
        symbols = Counter(each for each in factors if not isinstance(each, Number))
        if count and all(each.low is not None and each.low >= 1 for each in symbols):
            found.append((symbols, count * math.prod(numbers)))
        elif count:
            found.append((Counter([*symbols, item]), count))  # covered by nothing but itself
    return sorted(found, key=lambda term: -len(term[0]))


class IndexText:
    """Prints indices. `atom` is asked for the text of what arithmetic does not look into; `to`: the type of those that
    need not have 32 bits; `named`: products that have names."""

    def __init__(
        self,
        atom: Look,
        needs: Callable[[str], object],
        to: str = WIDE,
        named: Mapping[tuple[Index, ...], str] = MappingProxyType({}),
    ) -> None:
        self.atom, self.needs, self.to, self.named = atom, needs, to, named

    def text(self, index: Index) -> tuple[str, bool]:
        match index:
            case Number():
                return str(index.value), not is_narrow(index)
            case Atom():
                return self.atom(index)
            case Sum():
                return self.sum(index)
            case Product():
                return self.product(index)
            case FloorDiv() | Mod():
                return self.division(index)
            case Min() | Max():
                return self.choice(index)
        raise TypeError(f"no index: {index!r}")

    def operand(self, index: Index, wide: bool = False) -> tuple[str, bool]:
        """In brackets where it must be, made 64 bits wide where it is not surely so."""
        text, is_wide = self.text(index)
        if wide and not is_wide:
            return widened(text, self.to), True
        grouped = isinstance(index, Sum | Product | FloorDiv | Mod) or text.startswith("-")
        return (f"({text})" if grouped and not text.isidentifier() else text), is_wide

    def sum(self, index: Sum) -> tuple[str, bool]:
        # Every partial sum must fit: one part may be of 64 bits, and what wrapped before it joins is lost.
        total: int | None = abs(index.constant)
        for item, factor in index.terms:
            most = reach(item)
            total = None if total is None or most is None else total + abs(factor) * most
        wide = total is None or total >= INDEX_LIMIT_IN_32_BITS
        text = ""
        for item, factor in index.terms:
            part, _ = self.operand(item, wide)
            part = part if abs(factor) == 1 else f"{part} * {abs(factor)}"
            sign = " - " if factor < 0 else " + "
            text = text + sign + part if text else ("-" if factor < 0 else "") + part
        if index.constant:
            text += f" {'-' if index.constant < 0 else '+'} {abs(index.constant)}"
        return text, wide

    def product(self, index: Product) -> tuple[str, bool]:
        total: int | None = 1
        for factor in index.factors:
            most = reach(factor)
            total = None if total is None or most is None else total * max(most, 1)
        wide = total is None or total >= INDEX_LIMIT_IN_32_BITS
        left, texts = list(index.factors), []
        for factors, name in self.named.items():
            while not Counter(factors) - Counter(left):
                texts.append(name)
                for factor in factors:
                    left.remove(factor)
        return " * ".join([*(self.operand(factor, wide)[0] for factor in left), *texts]), wide

    def division(self, index: FloorDiv | Mod) -> tuple[str, bool]:
        top, top_wide = self.operand(index.top)
        bottom, bottom_wide = self.operand(index.bottom)
        wide = top_wide or bottom_wide
        if index.top.low is not None and index.top.low >= 0:
            return f"{top} {'//' if isinstance(index, FloorDiv) else '%'} {bottom}", wide
        name = "floor_divide" if isinstance(index, FloorDiv) else "floor_modulo"
        self.needs(name)
        return f"{name}({top}, {bottom})", wide

    def choice(self, index: Min | Max) -> tuple[str, bool]:
        name = "tl.minimum" if isinstance(index, Min) else "tl.maximum"
        parts = [self.text(item) for item in index.items]
        text = parts[0][0]
        for part, _ in parts[1:]:
            text = f"{name}({text}, {part})"
        return text, any(wide for _, wide in parts)
