"""What torch's shape environment knows about symbolic sizes: the one place where facts enter ferrite.

    range        `s0` is 2 or more
    replacement  `u0` is 4, since the program says so; torch writes 4 wherever `u0` stood
    guard        `s0 // 4` is 1: compared before each call of the compiled function, which is not called otherwise
    assertion    `u0 > 1`, asserted by the program: holds once it has been checked, after `u0` is known

Guards hold from the first line of a program on. What is known of a number that data decides (its name begins with u) is
known of a program that has checked it: whoever gives such a symbol its value has to (`ferrite.lower.assertions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Number = torch.SymInt | torch.SymBool | torch.SymFloat
Range = tuple[int | None, int | None]

MAX_BOUND = 1 << 62  # bounds beyond are torch's way to say there is none
VECTOR_ELEMENTS = 16  # that a GPU loads at once


def symbol_range(value: Number) -> Callable[[Any], Range]:
    """A function from the symbols in a size to the least and greatest value they may have."""
    known = value.node.shape_env

    def ends(symbol: Any) -> Range:
        only = _asserted_value(known, symbol)
        found = known.var_to_range.get(symbol)
        return (only, only) if only is not None else (None, None) if found is None else _ends(found)

    return ends


def _asserted_value(known: Any, symbol: Any) -> int | None:
    """The value that a number from data is asserted to have, where torch neither replaces it nor narrows its range: it
    lets `z.reshape([1])` assert `u0 == 1` and reads `u0` as 1 from then on, although 1 or 2 is all its range says."""
    for each in known.deferred_runtime_asserts.get(symbol, ()):
        sides: Sequence[Any] = each.expr.args if type(each.expr).__name__ == "Equality" else ()
        if symbol in sides:
            other = sides[0] if sides[1] == symbol else sides[1]
            if other.is_Integer:
                return int(other)
    return None


def likely_value(value: Number) -> Callable[[Any], int | None]:
    """A function from the symbols in a size to what they may well be: the two highest binary digits of what was seen,
    and as far as 16 the power of two that it is a multiple of, as rows that begin where a vector can be loaded are
    worth knowing: 768 for 1008, 776 for 1000, 56 for 56. Of what is less than 16, the power of two below. None where
    nothing was seen. Coarse, so that what is decided by it, and kept by it, is the same for sizes that are near."""
    seen = likely_values(value)

    def near(symbol: Any) -> int | None:
        found: Any = seen.get(symbol)
        if not getattr(found, "is_Integer", isinstance(found, int)):  # a ragged size was seen as a name, not a number
            return None
        if found < 1:
            return None
        seen_value = int(found)
        below = 1 << (seen_value.bit_length() - 1)
        if seen_value < VECTOR_ELEMENTS:
            return below
        first = below + (seen_value & below >> 1)
        power = math.gcd(seen_value, VECTOR_ELEMENTS)
        power = 1 if power == 2 else power  # twice that is a multiple of 16 no more often than of 1
        return first if math.gcd(first, VECTOR_ELEMENTS) == power else first + power

    return near


def likely_values(value: Number) -> Mapping[Any, Any]:
    """What symbols were when the function was traced, as sympy has it."""
    known = value.node.shape_env
    seen: Mapping[Any, Any] = (
        known.backed_var_to_val if hasattr(known, "backed_var_to_val") else known.var_to_val
    )  # 2.11
    return seen


def number_range(value: torch.SymInt) -> Range:
    """The least and greatest value that a number may have."""
    return _ends(value.node.shape_env.bound_sympy(value.node.expr))


def _ends(found: Any) -> Range:
    return _end(found.lower), _end(found.upper)


def _end(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer and abs(int(bound)) < MAX_BOUND else None


def symbols_of(value: Number) -> list[Any]:
    """The symbols in a number as it was made, as sympy has them, in the order of their names."""
    return sorted(value.node._expr.free_symbols, key=str)


def as_made(value: torch.SymInt) -> Any:
    """The expression of a number before facts found later took part in it: what a check of such a fact must look at."""
    return value.node._expr


def equal_by_assertion(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Whether two equal sizes are so only since an operator asserts it of a number that data decides: `z.reshape([1])`
    makes the size of `z` 1. Where a graph is traced anew, nobody knows that without the operator."""
    made = [as_made(each) if isinstance(each, torch.SymInt) else each for each in (left, right)]
    if made[0] == made[1]:
        return False
    sizes = [each for each in (left, right) if isinstance(each, torch.SymInt)]
    return any(each.node.shape_env.is_unbacked_symint(symbol) for each in sizes for symbol in symbols_of(each))


def is_so_by_assertion(size: object) -> bool:
    """Whether a size was a number that data decides, until an assertion said what it is."""
    if not isinstance(size, torch.SymInt):
        return False
    made, shape_env = as_made(size), size.node.shape_env
    return bool(made != size.node.expr and any(map(shape_env.is_unbacked_symint, made.free_symbols)))


def factor_of(value: torch.SymInt | torch.SymBool) -> tuple[int, Any] | None:
    """(n, symbol) where a whole number is known to be n times a symbol, or a truth to be that of one."""
    expression = value.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return None
    factor = expression / symbols[0] if isinstance(value, torch.SymInt) else None
    if factor is None:
        return (1, symbols[0])
    return (int(factor), symbols[0]) if factor.is_Integer else None


def facts_of_symbols(value: Number) -> Iterator[tuple[frozenset[str], str]]:
    """Every range, guard and assertion over the symbols around a number, as (names of symbols, text). Adds none."""
    known = value.node.shape_env
    for symbol, found in known.var_to_range.items():
        yield frozenset((str(symbol),)), f"{symbol} in {found.lower}..{found.upper}"
    for symbol in known.size_like:
        yield frozenset((str(symbol),)), f"{symbol} is a size"
    for expression in known.divisible:
        yield frozenset(map(str, expression.free_symbols)), f"{expression} is 0"
    asserted = [each.expr for several in known.deferred_runtime_asserts.values() for each in several]
    for condition in (*(guard.expr for guard in known.guards), *asserted):
        yield frozenset(map(str, condition.free_symbols)), str(condition)


def guarded_equalities(value: Number) -> Mapping[Any, Any]:
    """What guards say is equal, as sympy has it: what is larger to what is simpler, `s0 // 4` to 1.

    A symbol that equals something is replaced by torch itself, in every size; a guard was written down before that, and
    is read here as it stands now: `s4 * s55 == s81` says nothing more once `s81` is written `s4 * s55`. Whatever else
    is equal stays as it was made: `s0 // 4` is a size of its own, although every call has it 1. Where a sum is a
    number, so is the sum without its constant.
    """
    known = value.node.shape_env
    found: dict[Any, Any] = {}
    for guard in known.guards:
        condition = guard.expr
        if type(condition).__name__ != "Equality":
            continue
        simple, large = sorted(map(known.replace, condition.args), key=_size_of_expression)
        if large.args and large != simple:
            found[large] = simple
            constant, rest = large.as_coeff_Add()
            if constant and rest.args and simple.is_Integer:
                found[rest] = simple - constant
    return found


def simplest_equal(expression: Any, equalities: Mapping[Any, Any]) -> Any:
    """What guards hold equal to an expression, or to what it is but for a constant, or for a further division: the
    expression itself if none. `s0 // (2*s1)` is 16 where `s0 // s1` is 32."""
    found = equalities.get(expression)
    if found is None and expression.is_Add:
        constant, rest = expression.as_coeff_Add()
        found = equalities.get(rest)
        found = None if found is None else found + constant
    if found is None and type(expression).__name__ == "FloorDiv":
        found = _divided_further(expression, equalities)
    if found is None and expression.is_Mul:
        found = _with_products(expression, equalities)
    # equalities lead to what is simpler, so there is an end
    return expression if found is None else simplest_equal(found, equalities)


def _divided_further(quotient: Any, equalities: Mapping[Any, Any]) -> Any | None:
    """`t // (b*k)` is `(t // b) // k`, of which a guard may know the inner part."""
    top, bottom = quotient.args
    parts = bottom.as_ordered_factors()
    for place, part in enumerate(parts if len(parts) > 1 else ()):
        rest = bottom.func(*parts[:place], *parts[place + 1 :])
        for outer, inner in ((part, rest), (rest, part)):
            known = equalities.get(quotient.func(top, inner))
            if known is not None and known.is_Integer and outer.is_positive:
                return quotient.func(known, outer)
    return None


def _with_products(expression: Any, equalities: Mapping[Any, Any]) -> Any | None:
    """`a**2 * b**2` is `s**2` where a guard knows that `a*b` is `s`."""
    for large, simple in equalities.items():
        if large.is_Mul and large.free_symbols <= expression.free_symbols:
            made = expression.subs(large, simple)
            if _size_of_expression(made) < _size_of_expression(expression):
                return made
    return None


def guarded_ranges(value: Number, equalities: Mapping[Any, Any]) -> Mapping[Any, tuple[int, int]]:
    """The least and greatest value of symbols for which what guards hold equal is so: 8 where `2*s0 + s0 // 2` is 20.
    torch solves what is linear itself, and leaves the rest as it is."""
    seen = likely_values(value)
    found: dict[Any, tuple[int, int]] = {}
    for large, simple in equalities.items():
        symbols = list(large.free_symbols)
        if len(symbols) != 1 or not simple.is_Integer or not _grows(large):
            continue
        (symbol,) = symbols
        hint: Any = seen.get(symbol)
        if not getattr(hint, "is_Integer", isinstance(hint, int)):
            continue
        if large.subs(symbol, hint) == simple:
            low, high = found.get(symbol, (0, MAX_BOUND))
            first, last = _where_equal(large, symbol, int(simple), int(hint))
            found[symbol] = max(low, first), min(high, last)
    return found


def _grows(expression: Any) -> bool:
    """Whether an expression becomes no smaller as its symbols, which are sizes, become larger."""
    if expression.is_Symbol or (expression.is_Integer and expression >= 0):
        return True
    if type(expression).__name__ == "FloorDiv" and not (expression.args[1].is_Integer and expression.args[1] > 0):
        return False
    return type(expression).__name__ in ("Add", "Mul", "FloorDiv") and all(
        _grows(part) or (part.is_Integer and expression.is_Add) for part in expression.args
    )


def _where_equal(expression: Any, symbol: Any, wanted: int, inside: int) -> tuple[int, int]:
    """The ends of the values for which what grows with a symbol is as wanted. It is so for the value `inside`."""
    ends = []
    for way in (-1, 1):
        step, end = 1, inside
        while end + way * step >= 0 and step < MAX_BOUND and expression.subs(symbol, end + way * step) == wanted:
            end, step = end + way * step, step * 2
        while step > 1:
            step //= 2
            if end + way * step >= 0 and expression.subs(symbol, end + way * step) == wanted:
                end += way * step
        ends.append(end)
    return ends[0], ends[1]


def _size_of_expression(expression: Any) -> tuple[bool, int, str]:
    """Numbers first, then what has fewer parts, then by name: so that no two equalities lead back and forth."""
    return not expression.is_number, expression.count_ops(), str(expression)


COMPARISONS = {
    "GreaterThan": "ge",
    "StrictGreaterThan": "gt",
    "LessThan": "le",
    "StrictLessThan": "lt",
    "Equality": "eq",
}


def related(value: Number) -> Iterator[tuple[str, Any, Any]]:
    """What guards and assertions say of sizes together: the name of a comparison, and its sides as sympy has them."""
    known = value.node.shape_env
    asserted = [each.expr for several in known.deferred_runtime_asserts.values() for each in several]
    for condition in (*(guard.expr for guard in known.guards), *asserted):
        condition = known.replace(condition)
        if type(condition).__name__ in COMPARISONS:
            left, right = condition.args
            yield COMPARISONS[type(condition).__name__], left, right


def asserted(value: Number) -> Iterator[tuple[Any, str]]:
    """Conditions on numbers that data decides, as sympy has them, and what is said where one does not hold.

    torch takes them for granted while it traces, and drops what follows from them: once `u0 % 4 == 0` is asserted, the
    assertion itself is `True` in the graph. What torch replaces by (`u0` is 4) is not among them.
    """
    known = value.node.shape_env
    for several in known.deferred_runtime_asserts.values():
        for each in several:
            if known.replace(each.expr) not in (True, False):
                yield each.expr, f"Runtime assertion failed for expression {each.expr}"


def renamed(numbers: Sequence[int | torch.SymInt], pairs: Iterable[tuple[Any, Any]]) -> tuple[int | torch.SymInt, ...]:
    """Numbers with symbols in place of others: `pairs` are numbers under their old and their new names."""
    names: dict[Any, Any] = {}
    sums = []
    for old, new in pairs:
        if isinstance(old, torch.SymInt):
            expressions = old.node.expr, new.node.expr if isinstance(new, torch.SymInt) else new
            if expressions[0].is_Symbol:
                names[expressions[0]] = expressions[1]
            else:
                sums.append(expressions)
    for old, new in sums:  # `s0 + 2` that is now `u1 + 2`
        names.update(_solved(old, new, names))
    return tuple(number if isinstance(number, int) else _renamed(number, names) for number in numbers)


def _solved(old: Any, new: Any, names: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The one symbol of an expression that has no new name yet, from what the whole is now."""
    unknown = [each for each in old.free_symbols if each not in names]
    if len(unknown) != 1:
        return {}
    factor = old.coeff(unknown[0])
    rest = (old - factor * unknown[0]).expand()
    if not factor.is_Integer or factor == 0 or unknown[0] in rest.free_symbols:
        return {}
    found = ((new - rest.xreplace(dict(names))) / factor).expand()
    return {unknown[0]: found} if found.is_integer else {}


def _renamed(number: torch.SymInt, names: Mapping[Any, Any]) -> int | torch.SymInt:
    expression = number.node.expr.xreplace(names)
    if expression == number.node.expr:
        return number
    if expression.is_Integer:
        return int(expression)
    made: torch.SymInt = number.node.shape_env.create_symintnode(expression, hint=None)
    return made


def assumes_sizes(node: torch.fx.Node) -> bool:
    """Whether a node gives a size that data decides, and torch takes for a number, or for another size: `x[:n]` for
    which a later `expand(2, 2)` leaves no size but 2. A number itself is another matter: it is read, and compared."""
    made = node.meta.get("unbacked_bindings")
    value = node.meta.get("val")
    if not made or not isinstance(value, (torch.Tensor, tuple, list)):
        return False
    tensors = [value] if isinstance(value, torch.Tensor) else [each for each in value if isinstance(each, torch.Tensor)]
    known = next((getattr(getattr(each, "fake_mode", None), "shape_env", None) for each in tensors), None)
    return known is not None and any(_is_settled(known, symbol) for symbol in made)


def _is_settled(known: Any, symbol: Any) -> bool:
    """Whether torch takes a symbol for a number, or for an expression of others."""
    found = known.replace(symbol)
    if not found.is_Symbol:
        return True
    bounds = known.var_to_range.get(found)
    return _asserted_value(known, found) is not None or (bounds is not None and bounds.is_singleton())
