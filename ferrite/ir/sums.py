"""Sums and products of index expressions, in their normal form: terms with coefficients, in the order of their text."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from ferrite.ir.index import ONE, ZERO, Index, Mod, Number, Product, Sum, number

REMEMBERED = 1 << 14  # results that are kept, per operation
HAS_MODULO = operator.attrgetter("has_modulo")
MOST_TERMS = 256  # a product of sums is multiplied out up to this many terms


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


@functools.lru_cache(REMEMBERED)
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
    joined = True
    while joined:
        joined = False
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
                    joined = True
                    break
            if joined:
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


@functools.lru_cache(REMEMBERED)
def multiply(left: Index, right: Index) -> Index:
    if isinstance(left, Number):
        left, right = right, left
    if isinstance(right, Number):
        return ZERO if right.value == 0 else left if right.value == 1 else add([(left, right.value)])
    tops, bottoms = _all_terms(left), _all_terms(right)
    if (len(tops) == 1 and len(bottoms) == 1) or len(tops) * len(bottoms) > MOST_TERMS:
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
