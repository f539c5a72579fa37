"""Other expressions in place of the atoms of an index, and values in place of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ferrite.ir.index.algebra import (
    ONE,
    Atom,
    FloorDiv,
    Index,
    Max,
    Min,
    Mod,
    Number,
    Product,
    Sum,
    add,
    maximum,
    minimum,
    multiply,
    number,
)


def substitute(index: Index, new: Mapping[Any, Index] | Callable[[Atom], Index]) -> Index:
    """The expression with atoms replaced, all at once, and simplified again."""
    if callable(new):
        return rebuild(index, new)
    return index if index.atoms.isdisjoint(new) else rebuild(index, lambda atom: new.get(atom, atom))


def rebuild(
    index: Index,
    look: Callable[[Atom], Index],
    least: Callable[..., Index] = minimum,
    most: Callable[..., Index] = maximum,
) -> Index:
    """The expression made anew, simplified: atoms as `look` says, the choices between several as `least` and `most`."""
    rewritten: dict[Index, Index] = {}

    def rebuilt(item: Index) -> Index:
        if item not in rewritten:
            rewritten[item] = build(item)
        return rewritten[item]

    def build(item: Index) -> Index:
        match item:
            case Number():
                return item
            case Atom():
                return look(item)
            case Sum():
                return add([(number(item.constant), 1), *((rebuilt(part), factor) for part, factor in item.terms)])
            case Product():
                result: Index = ONE
                for factor in item.factors:
                    result = multiply(result, rebuilt(factor))
                return result
            case FloorDiv():
                return rebuilt(item.top) // rebuilt(item.bottom)
            case Mod():
                return rebuilt(item.top) % rebuilt(item.bottom)
            case Min():
                return least(*map(rebuilt, item.items))
            case Max():
                return most(*map(rebuilt, item.items))
        raise TypeError(f"no index: {item!r}")

    return rebuilt(index)


def evaluate(index: Index, values: Mapping[Any, Any] | Callable[[Atom], Any]) -> Any:
    """The value where atoms have these values: plain integers, or arrays of them with Python's operators."""
    return _value(index, values if callable(values) else values.__getitem__)


def _value(item: Index, look: Callable[[Atom], Any]) -> Any:
    """No closure: the cycle it makes would keep arrays alive."""
    match item:
        case Number():
            return item.value
        case Atom():
            return look(item)
        case Sum():
            total: Any = item.constant
            for part, factor in item.terms:
                total = total + _value(part, look) * factor
            return total
        case Product():
            return math.prod(_value(factor, look) for factor in item.factors)
        case FloorDiv():
            return _value(item.top, look) // _value(item.bottom, look)
        case Mod():
            return _value(item.top, look) % _value(item.bottom, look)
        case Min():
            return _least([_value(part, look) for part in item.items])
        case Max():
            return -_least([-_value(part, look) for part in item.items])
    raise TypeError(f"no index: {item!r}")


def _least(values: list[Any]) -> Any:
    least = values[0]
    for other in values[1:]:
        if isinstance(least, int) and isinstance(other, int):
            least = min(least, other)
        else:  # arrays: no branch on their values
            least = least + (other - least) * (other < least)
    return least
