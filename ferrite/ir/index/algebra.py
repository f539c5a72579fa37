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

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator

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
        return plus(self, as_index(other), 1)

    def __sub__(self, other: Index | int) -> Index:
        return plus(self, as_index(other), -1)

    def __mul__(self, other: Index | int) -> Index:
        return multiply(self, as_index(other))

    def __floordiv__(self, other: Index | int) -> Index:
        return floor_divide(self, as_index(other))

    def __mod__(self, other: Index | int) -> Index:
        return modulo(self, as_index(other))

    def __neg__(self) -> Index:
        return add([(self, -1)])

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
        bounds = [self.lowest, self.highest] if self.likely is None else [self.lowest, self.highest, self.likely]
        return f"{self.name} = symbol({', '.join(map(str, bounds))})"


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
            term_text = text(item) if plain else _wrapped(item, text)
            parts += ["- " if factor < 0 else "+ ", term_text if many == 1 else f"{many}*{term_text}", " "]
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
        if high is None or low is None or low < high:
            total = _total_of_opposites(self.items)
            if total is not None:  # the lesser of two is at most their mean
                high = total // 2 if high is None else min(high, total // 2)
        self.set(low, high, all(item.fixed for item in self.items))


class Max(_Choice):
    __slots__ = ()
    word = "max"

    def prepare(self) -> None:
        lows, highs = [item.low for item in self.items], [item.high for item in self.items]
        low = max((low for low in lows if low is not None), default=None)
        high = None if None in highs else max(high for high in highs if high is not None)
        if high is None or low is None or low < high:
            total = _total_of_opposites(self.items)
            if total is not None:  # the greater of two is at least their mean
                low = -(-total // 2) if low is None else max(low, -(-total // 2))
        self.set(low, high, all(item.fixed for item in self.items))


def _total_of_opposites(items: tuple[Index, ...]) -> int | None:
    """The sum of two items, where it is a number: that of `x - 1` and `1 - x`, of which the greater is `abs(x - 1)`."""
    if len(items) != 2:
        return None
    (one, ones), (other, others) = map(_constant_and_terms, items)
    if len(ones) != len(others) or dict(ones) != {part: -factor for part, factor in others}:
        return None
    return one + other


def _constant_and_terms(item: Index) -> tuple[int, tuple[tuple[Index, int], ...]]:
    return (item.constant, item.terms) if isinstance(item, Sum) else (0, ((item, 1),))


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


# --- text and bounds of nodes -----------------------------------------------------------------------------------------


def _wrapped(index: Index, text: Callable[[Index], str]) -> str:
    return f"({text(index)})" if isinstance(index, Sum | _Division | Product) else text(index)


def _product_bounds(low: Bound, high: Bound, least: Bound, most: Bound) -> tuple[Bound, Bound]:
    if None not in (low, high, least, most):
        ends = [a * b for a in (low, high) for b in (least, most)]  # type: ignore[operator]
        return min(ends), max(ends)
    if low is not None and least is not None and low >= 0 and least >= 0:
        return low * least, None if high is None or most is None else high * most
    return None, None


# --- sums and products ------------------------------------------------------------------------------------------------
#
# In normal form: terms with coefficients, in the order of their text.


MAX_REMEMBERED_RESULTS = 1 << 14  # results that are kept, per operation
HAS_MODULO = operator.attrgetter("has_modulo")
MAX_TERMS = 256  # a product of sums is multiplied out up to this many terms


def add(parts: Iterable[tuple[Index, int]]) -> Index:
    """The sum of parts times their factors."""
    constant, terms = 0, dict[Index, int]()
    for part, factor in parts:
        if isinstance(part, Number):
            constant += part.value * factor
        elif isinstance(part, Sum):
            constant += part.constant * factor
            for item, inner in part.terms:
                terms[item] = terms.get(item, 0) + inner * factor
        else:
            terms[part] = terms.get(part, 0) + factor
    return from_terms(constant, terms)


@functools.lru_cache(MAX_REMEMBERED_RESULTS)
def plus(left: Index, right: Index, factor: int) -> Index:
    """left + factor*right."""
    return add(((left, 1), (right, factor)))


def from_terms(constant: int, terms: dict[Index, int]) -> Index:
    """A sum from its terms: zeros dropped, `b*(x // b) + x % b` joined, in order."""
    terms = {item: factor for item, factor in terms.items() if factor}
    if len(terms) > 1 and any(map(HAS_MODULO, terms)):
        constant, terms = _join_divisions(constant, terms)
    if not terms:
        return number(constant)
    if constant == 0 and len(terms) == 1:
        (item, factor), *_ = terms.items()
        if factor == 1:
            return item
    if len(terms) == 1:
        return Sum.intern(constant, tuple(terms.items()))
    texts = {item.text: item for item in terms}
    if len(texts) < len(terms):  # different things with one name: no law of programs allows it, the order is as made
        return Sum.intern(constant, tuple(sorted(terms.items(), key=lambda term: term[0].text)))
    return Sum.intern(constant, tuple([(item := texts[text], terms[item]) for text in sorted(texts)]))


def _join_divisions(constant: int, terms: dict[Index, int]) -> tuple[int, dict[Index, int]]:
    """Where c*(x % b) stands beside c*b*(x // b), both are c*x."""
    has_merged = True
    while has_merged:
        has_merged = False
        for item, factor in list(terms.items()):
            for rest, part in _modulos(item):
                whole = _terms_of(multiply(multiply(part.bottom, part.top // part.bottom), rest))
                if whole and all(terms.get(inner, 0) == count * factor for inner, count in whole.items()):
                    del terms[item]
                    for inner in whole:
                        del terms[inner]
                    both = add([(multiply(part.top, rest), factor), (number(constant), 1), *terms.items()])
                    constant = both.value if isinstance(both, Number) else getattr(both, "constant", 0)
                    terms = _terms_of(both)
                    has_merged = True
                    break
            if has_merged:
                break
    return constant, terms


def _modulos(item: Index) -> Iterable[tuple[Index, Mod]]:
    """The remainders in a term, each with what it is multiplied by."""
    if isinstance(item, Mod):
        yield ONE, item
    elif isinstance(item, Product):
        for place, part in enumerate(item.factors):
            if isinstance(part, Mod):
                yield product(item.factors[:place] + item.factors[place + 1 :]), part


def _terms_of(index: Index) -> dict[Index, int]:
    if isinstance(index, Number):
        return {}
    return dict(index.terms) if isinstance(index, Sum) else {index: 1}


@functools.lru_cache(MAX_REMEMBERED_RESULTS)
def multiply(left: Index, right: Index) -> Index:
    if isinstance(left, Number):
        left, right = right, left
    if isinstance(right, Number):
        return ZERO if right.value == 0 else left if right.value == 1 else add([(left, right.value)])
    tops, bottoms = _all_terms(left), _all_terms(right)
    if (len(tops) == 1 and len(bottoms) == 1) or len(tops) * len(bottoms) > MAX_TERMS:
        if isinstance(left, Sum) and len(tops) == 1:
            return add([(multiply(left.terms[0][0], right), left.terms[0][1])])
        if isinstance(right, Sum) and len(bottoms) == 1:
            return add([(multiply(left, right.terms[0][0]), right.terms[0][1])])
        return product((left, right))
    return add([(multiply(a, b), m * n) for a, m in tops for b, n in bottoms])


def _all_terms(index: Index) -> list[tuple[Index, int]]:
    if not isinstance(index, Sum):
        return [(index, 1)]
    return [*index.terms, (ONE, index.constant)] if index.constant else list(index.terms)


def product(factors: Iterable[Index]) -> Index:
    """The product of factors none of which is a sum to be multiplied out."""
    flat: list[Index] = []
    for factor in factors:
        flat += factor.factors if isinstance(factor, Product) else [] if factor is ONE else [factor]
    if not flat:
        return ONE
    return flat[0] if len(flat) == 1 else Product.intern(tuple(sorted(flat, key=lambda item: item.text)))


# --- division and remainders ------------------------------------------------------------------------------------------
#
# All rules come from one fact, for b > 0 and any integers q, r: (b*q + r) // b = q + r // b and (b*q + r) % b = r % b.
# A divisor common to the bottom and to part of the top is taken out when what is left over is smaller than it:
# (g*x + r) // (g*b) = x // b  and  (g*x + r) % (g*b) = g*(x % b) + r,  where 0 <= r < g.


@functools.lru_cache(MAX_REMEMBERED_RESULTS)
def floor_divide(top: Index, bottom: Index) -> Index:
    if isinstance(bottom, Number):
        if bottom.value == 0:
            raise ZeroDivisionError(f"{top} // 0")
        if bottom.value < 0:
            return floor_divide(-top, number(-bottom.value))
    if bottom is ONE or top is ZERO:
        return top
    if top is bottom:
        return ONE
    whole, rest = split(top, bottom)
    if whole is not ZERO:
        return add([(whole, 1), (floor_divide(rest, bottom), 1)])
    quotient = constant_quotient(rest, bottom)
    if quotient is not None:
        return number(quotient)
    match rest:
        case FloorDiv():
            return floor_divide(rest.top, multiply(rest.bottom, bottom))
        case Mod() if (many := exact(rest.bottom, bottom)) is not None:
            return floor_divide(rest.top, bottom) % many
        case Sum() if (inner := only_quotient(rest)) is not None:
            opened = multiply(rest - inner, inner.bottom) + inner.top
            return floor_divide(opened, multiply(inner.bottom, bottom))
    for common in common_divisors(rest, bottom):
        multiple, left = split(rest, common)
        turns = constant_quotient(left, common)
        if turns is not None and multiple is not ZERO:
            return floor_divide(multiple + turns, exact(bottom, common) or ONE)
    return FloorDiv.intern(rest, bottom)


def only_quotient(top: Sum) -> FloorDiv | None:
    """The y // b of x + y // b: a division of it joins with that one, (x + y // b) // c = (b*x + y) // (b*c)."""
    found = [item for item, factor in top.terms if factor == 1 and isinstance(item, FloorDiv)]
    return found[0] if len(found) == 1 else None


@functools.lru_cache(MAX_REMEMBERED_RESULTS)
def modulo(top: Index, bottom: Index) -> Index:
    if isinstance(bottom, Number):
        if bottom.value == 0:
            raise ZeroDivisionError(f"{top} % 0")
        if bottom.value < 0:
            return -modulo(-top, number(-bottom.value))
    if bottom is ONE or top is bottom or top is ZERO:
        return ZERO
    _, rest = split(top, bottom)
    rest = without_inner_modulo(rest, bottom)
    quotient = constant_quotient(rest, bottom)
    if quotient is not None:
        return rest - bottom * quotient
    if rest is not top:  # shortened: the rules may say more now
        return modulo(rest, bottom)
    for common in common_divisors(rest, bottom):
        multiple, left = split(rest, common)
        turns = constant_quotient(left, common)
        if turns is not None and multiple is not ZERO:
            inner = modulo(multiple + turns, exact(bottom, common) or ONE)
            return multiply(common, inner) + (left - multiply(common, number(turns)))
    return Mod.intern(rest, bottom)


def without_inner_modulo(top: Index, bottom: Index) -> Index:
    """(c*(y % m) + r) % b = (c*y + r) % b where b divides c*m."""
    terms = dict(top.terms) if isinstance(top, Sum) else {top: 1}
    inner = {
        item: factor
        for item, factor in terms.items()
        if isinstance(item, Mod) and exact(multiply(item.bottom, number(factor)), bottom) is not None
    }
    if not inner:
        return top
    opened = [(item.top if item in inner else item, factor) for item, factor in terms.items()]
    return split(add([(number(top.constant if isinstance(top, Sum) else 0), 1), *opened]), bottom)[1]


def split(top: Index, bottom: Index) -> tuple[Index, Index]:
    """(q, r) with top = bottom*q + r, as much of it in q as whole terms allow; a number in r is below the bottom."""
    if isinstance(bottom, Sum) and (bottom.constant or len(bottom.terms) > 1):
        return split_by_sum(top, bottom)
    constant, terms = (top.constant, top.terms) if isinstance(top, Sum) else (0, ((top, 1),))
    if isinstance(top, Number):
        constant, terms = top.value, ()
    quotient, rest = dict[Index, int](), dict[Index, int]()
    wholes: list[tuple[Index, int]] = []
    turns = 0
    if isinstance(bottom, Number):
        turns, constant = divmod(constant, bottom.value)
    for item, factor in terms:
        if isinstance(bottom, Number):
            part, kept = (quotient, factor // bottom.value) if factor % bottom.value == 0 else (rest, factor)
            part[item] = kept
        else:
            found = exact(multiply(item, number(factor)), bottom)
            if found is None:
                rest[item] = factor
            else:
                wholes.append((found, 1))
    return add([(from_terms(turns, quotient), 1), *wholes]), from_terms(constant, rest)


def split_by_sum(top: Index, bottom: Sum) -> tuple[Index, Index]:
    """(q, r) as `split` has them, where the bottom is a sum: h*(s + 1) + d is written h*s + h + d."""
    quotient: Index = ZERO
    first, coefficient = bottom.terms[0]
    leading = multiply(first, number(coefficient))
    found = True
    while found:
        found = False
        for item, factor in top.terms if isinstance(top, Sum) else ((top, 1),):
            many = _exact_term(item, factor, leading)
            if many is None:
                continue
            left = top - multiply(many, bottom)
            if terms_in(left) < terms_in(top):
                quotient, top, found = quotient + many, left, True
                break
    return quotient, top


def terms_in(index: Index) -> int:
    if isinstance(index, Sum):
        return len(index.terms) + (index.constant != 0)
    return 0 if index is ZERO else 1


def exact(top: Index, bottom: Index) -> Index | None:
    """top / bottom where it is a whole number for every assignment; None where that is not plain to see."""
    if top is bottom:
        return ONE
    if bottom is ONE:
        return top
    if isinstance(top, Sum):
        if isinstance(bottom, Sum):
            return _exact_sums(top, bottom)
        parts = [
            exact(multiply(item, number(factor)), bottom)
            if top.constant or len(top.terms) > 1
            else _exact_term(item, factor, bottom)
            for item, factor in top.terms
        ]
        if top.constant:
            parts.append(_exact_number(top.constant, bottom))
        return None if None in parts else add([(part, 1) for part in parts if part is not None])
    if isinstance(top, Number):
        return _exact_number(top.value, bottom)
    return _exact_term(top, 1, bottom)


def _exact_number(value: int, bottom: Index) -> Index | None:
    if isinstance(bottom, Number) and bottom.value and value % bottom.value == 0:
        return number(value // bottom.value)
    return None


def _exact_term(item: Index, factor: int, bottom: Index) -> Index | None:
    coefficient, factors = monomial(bottom)
    if factors is None or coefficient == 0 or factor % coefficient:
        return None
    left = list(item.factors) if isinstance(item, Product) else [item]
    for part in factors:
        if part not in left:
            return None
        left.remove(part)
    return multiply(product(left), number(factor // coefficient))


def _exact_sums(top: Sum, bottom: Sum) -> Index | None:
    """One sum is a multiple of another: the first term tells which, the product tells whether."""
    first = bottom.terms[0]
    for item, factor in top.terms:
        many = _exact_term(item, factor, multiply(first[0], number(first[1])))
        if many is not None and multiply(bottom, many) is top:
            return many
    return None


def monomial(index: Index) -> tuple[int, tuple[Index, ...] | None]:
    """(4, (s0, s1)) of 4*s0*s1; None for factors where the expression is a sum."""
    match index:
        case Number():
            return index.value, ()
        case Sum():
            if index.constant or len(index.terms) > 1:
                return 1, None
            item, factor = index.terms[0]
            return factor, monomial(item)[1]
        case Product():
            return 1, index.factors
    return 1, (index,)


def common_divisors(top: Index, bottom: Index) -> Iterator[Index]:
    """What divides the bottom and some terms of the top, the largest first."""
    coefficient, factors = monomial(bottom)
    if factors is None:
        return
    terms = top.terms if isinstance(top, Sum) else ((top, 1),)
    seen: dict[Index, None] = {}
    for item, factor in terms:
        shared = [part for part in factors if part in (item.factors if isinstance(item, Product) else (item,))]
        seen[multiply(product(shared), number(math.gcd(factor, coefficient)))] = None
    candidates = [divisor for divisor in seen if divisor is not ONE and divisor is not bottom and positive(divisor)]
    yield from sorted(candidates, key=lambda divisor: (-(divisor.high or 1 << 62), divisor.text))


def constant_quotient(top: Index, bottom: Index) -> int | None:
    """top // bottom where it is the same number for every assignment."""
    if top.low is not None and top.high is not None and isinstance(bottom, Number):
        least = top.low // bottom.value
        if least == top.high // bottom.value:
            return least
        if top.fixed:
            return None
    for quotient in (0, -1):
        low = top if quotient == 0 else top + bottom
        if never_negative(low) and never_negative(bottom - ONE - low):
            return quotient
    return None


# --- what can be proved of bounds -------------------------------------------------------------------------------------


def positive(index: Index) -> bool:
    return index.low is not None and index.low > 0


def never_negative(index: Index) -> bool:
    """Proved, by bounds, or by putting every axis, and every remainder, where it makes the expression smallest."""
    if index.low is not None:
        if index.low >= 0:
            return True
        if index.fixed or (index.high is not None and index.high < 0):
            return False
    least = smallest(index)
    if least is not index and least.low is not None and least.low >= 0:
        return True
    rounded = unrounded(least)
    return rounded is not least and rounded.low is not None and rounded.low >= 0


def smallest(index: Index) -> Index:
    """A lower bound without axes, where terms with axes have a known sign; sound, not always the best."""
    if not isinstance(index, Sum):
        index_terms: tuple[tuple[Index, int], ...] = ((index, 1),)
        constant = 0
    else:
        index_terms, constant = index.terms, index.constant
    parts: list[tuple[Index, int]] = [(number(constant), 1)]
    for item, factor in index_terms:
        parts.append((largest_item(item) if factor < 0 else smallest_item(item), factor))
    return add(parts)


def unrounded(index: Index) -> Index:
    """A lower bound without quotients that are multiplied by their divisors: x - b < x // b * b <= x."""
    if not isinstance(index, Sum):
        return index
    parts: list[tuple[Index, int]] = [(number(index.constant), 1)]
    for item, factor in index.terms:
        if isinstance(item, FloorDiv) and isinstance(item.bottom, Number) and factor % item.bottom.value == 0:
            times = factor // item.bottom.value
            item, factor = (item.top - (item.bottom.value - 1) if times > 0 else item.top), times
        parts.append((item, factor))
    return add(parts)


def smallest_item(item: Index) -> Index:
    bounded = [part for part in parts_of(item) if limit(part) is not None]
    return ZERO if bounded and all(part.low is not None and part.low >= 0 for part in parts_of(item)) else item


def largest_item(item: Index) -> Index:
    parts = parts_of(item)
    if any(part.low is None or part.low < 0 for part in parts):
        return item
    result: Index = ONE
    for part in parts:
        most = limit(part)
        result = multiply(result, part if most is None else most)
    return result


def parts_of(item: Index) -> tuple[Index, ...]:
    return item.factors if isinstance(item, Product) else (item,)


def limit(item: Index) -> Index | None:
    """The largest value of a part that ranges from zero, as an expression without it."""
    match item:
        case Axis():
            return item.extent - 1
        case Mod():
            return item.bottom - 1
        case FloorDiv() if item.top.low is not None and item.top.low >= 0 and positive(item.bottom):
            most = largest_item(item.top) if not isinstance(item.top, Sum) else _largest_sum(item.top)
            return None if most is item.top else most // item.bottom
        case Atom():
            return None
    return None


def _largest_sum(top: Sum) -> Index:
    return -smallest(-top)


# --- choices ----------------------------------------------------------------------------------------------------------


def minimum(*items: Index | int) -> Index:
    return _choose(Min, items, _at_most)


def maximum(*items: Index | int) -> Index:
    return _choose(Max, items, lambda large, other: _at_most(other, large))


def _at_most(small: Index, large: Index) -> bool:
    return never_negative(large - small)


def _choose(kind: type[Min] | type[Max], items: Iterable[Index | int], wins: Callable[[Index, Index], bool]) -> Index:
    flat: dict[Index, None] = {}
    for item in map(as_index, items):
        flat.update(dict.fromkeys(item.items if isinstance(item, kind) else (item,)))
    kept = sorted(flat, key=TEXT)
    for item in sorted(kept, key=lambda item: (-len(item.text), item.text)):  # of two that are equal the simpler stays
        if any(other is not item and wins(other, item) for other in kept):
            kept.remove(item)
    return kept[0] if len(kept) == 1 else kind.intern(tuple(kept))


def forget() -> None:
    """Drop what is remembered of earlier arithmetic. Nothing but time is lost."""
    for remembered in (plus, multiply, floor_divide, modulo):
        remembered.cache_clear()
