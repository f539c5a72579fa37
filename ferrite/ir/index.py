"""Index arithmetic: mathematical integers, in one normal form, with bounds.

    index = Number(value)
          | Symbol(name, low, high, likely)    a size known at run time: low <= s <= high, None for no bound;
                                           `likely` is a value it may well have, for choices that only cost time
          | Axis(name, extent)             a loop variable: 0 <= i < extent
          | Sum(constant, terms)           4*i0 + i1 + 3        terms: (what, coefficient), in the order of their text
          | Product(factors)               i0*s0                two or more atoms
          | FloorDiv(top, bottom) | Mod(top, bottom)            rounding down, as Python does; bottom > 0
          | Min(items) | Max(items)

Build with `+ - * // %`, `minimum` and `maximum`; what comes out is simplified. Nodes are interned: two expressions that
simplify to the same form are the same object. Every rule keeps the value for every assignment within the bounds.

    >>> i, j = axis("i", 8), axis("j", 6)
    >>> flat = i * 6 + j
    >>> flat // 6, flat % 6, flat // 6 * 6 + flat % 6
    (i, j, 6*i + j)
    >>> (i * 6 + j) // 3
    2*i + j // 3
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from ferrite.ir.intern import Interned

Bound = int | None
TEXT = operator.attrgetter("text")
keep = object.__setattr__  # nodes are set once, while they are made


class Index(Interned):
    """One integer expression. `low` and `high` bound it (None: not bounded on that side)."""

    __slots__ = ("_atoms", "_text", "fixed", "high", "low")
    low: Bound
    high: Bound
    fixed: bool  # no symbol bounds it or is in it: its bounds are as good as any proof
    has_modulo = False  # a remainder, or a product with one
    _text: str
    _atoms: frozenset[Atom]

    def set(self, low: Bound, high: Bound, fixed: bool) -> None:
        keep(self, "low", low)
        keep(self, "high", high)
        keep(self, "fixed", fixed)

    @property
    def parts(self) -> Iterable[Index]:
        """The expressions it is made of."""
        return ()

    @property
    def text(self) -> str:
        try:
            return self._text
        except AttributeError:  # most nodes are steps on the way to others, and never asked
            keep(self, "_text", self.spell(TEXT))
            return self._text

    @property
    def atoms(self) -> frozenset[Atom]:
        """The symbols, axes and data it depends on."""
        try:
            return self._atoms
        except AttributeError:
            keep(self, "_atoms", frozenset[Atom]().union(*[part.atoms for part in self.parts]))
            return self._atoms

    def spell(self, text: Callable[[Index], str]) -> str:
        """This node as Python source, its parts as `text` says."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Index | int) -> Index:
        return sums.plus(self, as_index(other), 1)

    def __sub__(self, other: Index | int) -> Index:
        return sums.plus(self, as_index(other), -1)

    def __mul__(self, other: Index | int) -> Index:
        return sums.multiply(self, as_index(other))

    def __floordiv__(self, other: Index | int) -> Index:
        return division.floor_divide(self, as_index(other))

    def __mod__(self, other: Index | int) -> Index:
        return division.modulo(self, as_index(other))

    def __neg__(self) -> Index:
        return sums.add([(self, -1)])

    def __radd__(self, other: int) -> Index:
        return self + other

    def __rsub__(self, other: int) -> Index:
        return as_index(other) - self

    def __rmul__(self, other: int) -> Index:
        return self * other


class Number(Index):
    __slots__ = ("value",)
    fields = ("value",)
    value: int

    def prepare(self) -> None:
        self.set(self.value, self.value, True)

    def spell(self, text: Callable[[Index], str]) -> str:
        return str(self.value)


class Atom(Index):
    """What arithmetic does not look into. Symbols and axes are the atoms of this module; others may add theirs."""

    __slots__ = ()

    @property
    def atoms(self) -> frozenset[Atom]:
        return frozenset([self])


class Symbol(Atom):
    __slots__ = ("highest", "likely", "lowest", "name")
    fields = ("name", "lowest", "highest", "likely")
    name: str
    lowest: Bound
    highest: Bound
    likely: int | None

    def prepare(self) -> None:
        self.set(self.lowest, self.highest, False)

    def spell(self, text: Callable[[Index], str]) -> str:
        return self.name

    @property
    def declared(self) -> str:
        """What a program or kernel says of it, as source."""
        known = [self.lowest, self.highest] if self.likely is None else [self.lowest, self.highest, self.likely]
        return f"{self.name} = symbol({', '.join(map(str, known))})"


class Axis(Atom):
    __slots__ = ("extent", "name")
    fields = ("name", "extent")
    name: str
    extent: Index

    def prepare(self) -> None:
        high = None if self.extent.high is None else max(self.extent.high - 1, 0)
        self.set(0, high, isinstance(self.extent, Number))

    def spell(self, text: Callable[[Index], str]) -> str:
        return self.name


class Sum(Index):
    __slots__ = ("constant", "terms")
    fields = ("constant", "terms")
    constant: int
    terms: tuple[tuple[Index, int], ...]

    def prepare(self) -> None:
        low: Bound = self.constant
        high: Bound = self.constant
        fixed = True
        for item, factor in self.terms:
            least, most = (item.low, item.high) if factor > 0 else (item.high, item.low)
            low = None if low is None or least is None else low + factor * least
            high = None if high is None or most is None else high + factor * most
            fixed = fixed and item.fixed
        self.set(low, high, fixed)

    @property
    def parts(self) -> Iterable[Index]:
        return [item for item, _ in self.terms]

    def spell(self, text: Callable[[Index], str]) -> str:
        parts: list[str] = []
        for item, factor in self.terms:
            many = abs(factor)
            unary = factor < 0 and not parts  # a sign in front binds tighter than a division
            plain = isinstance(item, Product) or (many == 1 and not (unary and isinstance(item, _Division)))
            what = text(item) if plain else _wrapped(item, text)
            parts += ["- " if factor < 0 else "+ ", what if many == 1 else f"{many}*{what}", " "]
        if self.constant:
            parts.append(f"{'-' if self.constant < 0 else '+'} {abs(self.constant)}")
        whole = "".join(parts).removeprefix("+ ").rstrip()
        return f"-{whole[2:]}" if whole.startswith("- ") else whole


class Product(Index):
    __slots__ = ("factors", "has_modulo")
    fields = ("factors",)
    factors: tuple[Index, ...]
    has_modulo: bool

    def prepare(self) -> None:
        low, high = self.factors[0].low, self.factors[0].high
        for factor in self.factors[1:]:
            low, high = _product_bounds(low, high, factor.low, factor.high)
        self.set(low, high, all(factor.fixed for factor in self.factors))
        keep(self, "has_modulo", any(factor.has_modulo for factor in self.factors))

    @property
    def parts(self) -> Iterable[Index]:
        return self.factors

    def spell(self, text: Callable[[Index], str]) -> str:
        return "*".join([_wrapped(factor, text) for factor in self.factors])


class _Division(Index):
    __slots__ = ("bottom", "top")
    fields = ("top", "bottom")
    top: Index
    bottom: Index
    sign = ""

    @property
    def parts(self) -> Iterable[Index]:
        return self.top, self.bottom

    def spell(self, text: Callable[[Index], str]) -> str:
        return f"{_wrapped(self.top, text)} {self.sign} {_wrapped(self.bottom, text)}"


class FloorDiv(_Division):
    __slots__ = ()
    sign = "//"

    def prepare(self) -> None:
        top, bottom = self.top, self.bottom
        least, most = max(bottom.low or 1, 1), bottom.high  # bottom is at least 1
        low: Bound = None
        if top.low is not None:
            low = top.low // least if top.low < 0 else (0 if most is None else top.low // most)
        high: Bound = None
        if top.high is not None:
            high = top.high // least if top.high >= 0 else (-1 if most is None else top.high // most)
        self.set(low, high, top.fixed and bottom.fixed)


class Mod(_Division):
    __slots__ = ()
    sign = "%"
    has_modulo = True

    def prepare(self) -> None:
        high = None if self.bottom.high is None else self.bottom.high - 1
        if self.top.low is not None and self.top.low >= 0 and self.top.high is not None:
            high = self.top.high if high is None else min(high, self.top.high)
        self.set(0, high, self.top.fixed and self.bottom.fixed)


class _Choice(Index):
    __slots__ = ("items",)
    fields = ("items",)
    items: tuple[Index, ...]
    word = ""

    @property
    def parts(self) -> Iterable[Index]:
        return self.items

    def spell(self, text: Callable[[Index], str]) -> str:
        return f"{self.word}({', '.join(map(text, self.items))})"


class Min(_Choice):
    __slots__ = ()
    word = "min"

    def prepare(self) -> None:
        lows, highs = [item.low for item in self.items], [item.high for item in self.items]
        low = None if None in lows else min(low for low in lows if low is not None)
        high = min((high for high in highs if high is not None), default=None)
        self.set(low, high, all(item.fixed for item in self.items))


class Max(_Choice):
    __slots__ = ()
    word = "max"

    def prepare(self) -> None:
        lows, highs = [item.low for item in self.items], [item.high for item in self.items]
        low = max((low for low in lows if low is not None), default=None)
        high = None if None in highs else max(high for high in highs if high is not None)
        self.set(low, high, all(item.fixed for item in self.items))


def number(value: int) -> Number:
    return _SMALL.get(value) or Number.intern(int(value))


def as_index(value: Index | int) -> Index:
    return value if isinstance(value, Index) else number(value)


def symbol(name: str, low: Bound = None, high: Bound = None, likely: int | None = None) -> Symbol:
    return Symbol.intern(name, low, high, likely)


def axis(name: str, extent: Index | int) -> Axis:
    return Axis.intern(name, as_index(extent))


_SMALL: dict[int, Number] = {}
_SMALL.update({value: Number.intern(value) for value in range(-1, 257)})
ZERO, ONE = number(0), number(1)


# --- choices ----------------------------------------------------------------------------------------------------------


def minimum(*items: Index | int) -> Index:
    return _choose(Min, items, _at_most)


def maximum(*items: Index | int) -> Index:
    return _choose(Max, items, lambda large, other: _at_most(other, large))


def _at_most(small: Index, large: Index) -> bool:
    return division.never_negative(large - small)


def _choose(kind: type[Min] | type[Max], items: Iterable[Index | int], wins: Callable[[Index, Index], bool]) -> Index:
    flat: dict[Index, None] = {}
    for item in map(as_index, items):
        flat.update(dict.fromkeys(item.items if isinstance(item, kind) else (item,)))
    kept = sorted(flat, key=TEXT)
    for item in sorted(kept, key=lambda item: (-len(item.text), item.text)):  # of two that are equal the simpler stays
        if any(other is not item and wins(other, item) for other in kept):
            kept.remove(item)
    return kept[0] if len(kept) == 1 else kind.intern(tuple(kept))


# --- text and bounds --------------------------------------------------------------------------------------------------


def _wrapped(index: Index, text: Callable[[Index], str]) -> str:
    return f"({text(index)})" if isinstance(index, Sum | _Division | Product) else text(index)


def _product_bounds(low: Bound, high: Bound, least: Bound, most: Bound) -> tuple[Bound, Bound]:
    if None not in (low, high, least, most):
        ends = [a * b for a in (low, high) for b in (least, most)]  # type: ignore[operator]
        return min(ends), max(ends)
    if low is not None and least is not None and low >= 0 and least >= 0:
        return low * least, None if high is None or most is None else high * most
    return None, None


# The rules build on the nodes above, and the nodes' operators on the rules.
from ferrite.ir import division, sums  # noqa: E402
from ferrite.ir.index_values import evaluate as evaluate  # noqa: E402
from ferrite.ir.index_values import substitute as substitute  # noqa: E402
from ferrite.ir.sums import add as add  # noqa: E402
from ferrite.ir.sums import multiply as multiply  # noqa: E402


def forget() -> None:
    """Drop what is remembered of earlier arithmetic. Nothing but time is lost."""
    for remembered in (sums.plus, sums.multiply, division.floor_divide, division.modulo):
        remembered.cache_clear()
