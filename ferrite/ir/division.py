"""Floor division and remainder of index expressions, and what can be proved about their size.

All rules come from one fact: for b > 0 and any integers q, r:  (b*q + r) // b = q + r // b  and  (b*q + r) % b = r % b.
A divisor common to the bottom and to part of the top is taken out when what is left over is smaller than it:
(g*x + r) // (g*b) = x // b  and  (g*x + r) % (g*b) = g*(x % b) + r,  where 0 <= r < g.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from ferrite.ir.index import (
    ONE,
    ZERO,
    Atom,
    Axis,
    FloorDiv,
    Index,
    Mod,
    Number,
    Product,
    Sum,
    number,
)
from ferrite.ir.sums import REMEMBERED, add, from_terms, multiply, product


@functools.lru_cache(REMEMBERED)
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


@functools.lru_cache(REMEMBERED)
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
