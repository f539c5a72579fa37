"""Whether the points of a loop are at different places of a buffer, so that they may be stored in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.ir.expr import data_of
from ferrite.ir.index.algebra import Axis, Index, Number, Product, Sum, Symbol, add, number
from ferrite.ir.index.nested_bounds import never_negative_in_loops as never_negative


def keeps_apart(place: Index, axes: set[Axis]) -> bool:
    """Whether different values of the axes are at different places, whatever is read from memory.

    Axes with small factors are told by the remainder of what memory moves the place by; those with factors larger than
    all that by the quotient. What is added below them counts with them: of 40*d + 5*i + j with j below 5 and i below 8,
    i is told by the remainder of 40.
    """
    if not data_of(place):
        return True
    terms = place.terms if isinstance(place, Sum) else ((place, 1),)
    terms = tuple((item, factor) for item, factor in terms if item in axes or item.low != 0 or item.high != 0)
    mine = [(item, factor) for item, factor in terms if item in axes]
    least_mine = min((abs(factor) for _, factor in mine), default=0)
    below = [(item, factor) for item, factor in terms if item not in axes and is_below(item, factor, least_mine)]
    others = [term for term in terms if term not in mine and term not in below]
    reach = sum(factor * (item.high or 0) for item, factor in below)
    steps = [step_of(item, factor) for item, factor in others]
    least = min((step.value for step in steps if isinstance(step, Number)), default=None)
    near = [(item, factor) for item, factor in mine if least is None or abs(factor) < least]
    far = [(item, factor) for item, factor in mine if not (least is None or abs(factor) < least)]
    if len(mine) < len(axes) or any(factor < 0 for _, factor in mine) or not nested(near, reach):
        return False
    inside = add([*near, *below])
    if near and not all(never_negative(step - 1 - inside) for step in steps):
        return False
    spread = 0
    for item, factor in (*near, *below, *others):
        if item.low is None or item.high is None:
            return not far
        spread += abs(factor) * (item.high - item.low)
    return nested(far, spread)


def is_below(item: Index, factor: int, least: int) -> bool:
    """Whether a term (another loop's, or an index, which is checked) moves the place by less than any axis."""
    return item.low is not None and item.low >= 0 and item.high is not None and 0 < factor * item.high < least


def step_of(item: Index, factor: int) -> Index:
    """What a term is a multiple of, whatever memory says."""
    sizes = [part for part in item.factors if isinstance(part, Symbol)] if isinstance(item, Product) else []
    return math.prod(sizes, start=number(abs(factor)))


def nested(terms: Sequence[tuple[Index, int]], reach: int) -> bool:
    """Whether each factor is larger than all that terms with smaller ones can add up to."""
    unbounded = False  # the term with the largest factor may add up to anything: no other lies above it
    for item, factor in sorted(terms, key=lambda term: abs(term[1])):
        if unbounded or abs(factor) <= reach:
            return False
        unbounded = item.high is None
        reach += abs(factor) * (item.high or 0)
    return True
