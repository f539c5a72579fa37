"""Where eager puts the results of elementwise operators, and of those that make a tensor like another.

These are eager's rules, for sizes and strides that are index expressions. A rule says each stride of a result as a
`StrideTerm`: a stride of an operand, or a product of sizes. It asks whether sizes are 0 or 1 and which of two strides
is larger; where what is known of the symbols does not tell, it raises `Undecided`. Sizes that may be 0 or 1 at run
time are tried out as such: what is told holds for them, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ferrite.errors import NotLowered
from ferrite.ir import (
    ONE,
    ZERO,
    Index,
    Number,
    Product,
    Sum,
    Symbol,
    as_index,
    maximum,
    never_negative,
    number,
    substitute,
    symbol,
)

MAX_SIZE_CASES = 64  # of sizes that are 0, 1 or larger
MAX_VALUES_TRIED = 8  # values of one symbol that are tried out
CHANNELS_LAST = (1, 3, 2, 0)  # dimensions, the innermost first


class Undecided(NotLowered):
    """What is known of the sizes does not tell how a result lies."""


@dataclass(frozen=True)
class Placed:
    """The sizes and strides of an operand."""

    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]


@dataclass(frozen=True)
class StrideTerm:
    """A stride of a result: that of a dimension of an operand, if any, times the sizes of `inside` of the result.
    `at_least_one`: where a size of 0 counts as 1. `nowhere`: it is 0."""

    operand: tuple[int, int] | None = None
    inside: tuple[int, ...] = ()
    at_least_one: bool = True
    nowhere: bool = False

    def of(self, sizes: Sequence[Any], strides: Sequence[Sequence[Any]], at_least_one: Callable[[Any], Any]) -> Any:
        """The stride as a number of whatever kind, from the result's sizes and the operands' strides."""
        if self.nowhere:
            return 0
        found = [sizes[dim] for dim in self.inside]
        inner = math.prod([at_least_one(size) for size in found] if self.at_least_one else found)
        if self.operand is None:
            return inner
        place, dim = self.operand
        return strides[place][dim] * inner if self.inside else strides[place][dim]


NOWHERE = StrideTerm(nowhere=True)  # all places along the dimension are the same
Steps = tuple[StrideTerm, ...]
Rule = Callable[[Sequence[Placed], tuple[Index, ...]], Steps]


# --- rules ------------------------------------------------------------------------------------------------------------


def like_operand(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`empty_like`, `clone`, `to`, `sort`, `flip`: the operand's strides, if it is dense, else dense in its order."""
    (operand,) = operands
    if is_dense(operand):
        return same_as(operand)
    order = in_order(sizes, [operand.strides])
    return tuple(StrideTerm(inside=tuple(order[: order.index(dim)])) for dim in range(len(sizes)))


def elementwise(operands: Sequence[Placed], sizes: tuple[Index, ...], numbers: bool = False) -> Steps:
    """The result of an iteration over operands. `numbers`: some are numbers, or tensors without dimensions."""
    if not numbers and all(each.sizes == sizes for each in operands):
        if all(map(is_contiguous, operands)):
            return contiguous_steps(len(sizes))
        if len(sizes) == 4 and all(lies_in(each, CHANNELS_LAST) for each in operands):
            return in_order_steps(CHANNELS_LAST)
        if all(map(is_dense, operands)) and all(
            is_equal(one, other)
            for each in operands[1:]
            for one, other in zip(operands[0].strides, each.strides, strict=True)
        ):
            return same_as(operands[0])
    order = in_order(sizes, [spread(each, sizes) for each in operands])
    if order == list(reversed(range(len(sizes)))):
        return contiguous_steps(len(sizes))
    return in_order_steps(order)


def compared_with_number(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`isinf`: a number is compared with the result of an iteration."""
    absolute = Placed(sizes, tuple(number_of(step, operands, sizes) for step in elementwise(operands, sizes)))
    return elementwise([absolute], sizes, numbers=True)


def contiguous_result(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    return contiguous_steps(len(sizes))


def expanded(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`expand`: a dimension in front lies around the next one, which may have become one of stride 0."""
    (operand,) = operands
    if not operand.sizes:  # one element, whatever the sizes
        return (NOWHERE,) * len(sizes)
    missing = len(sizes) - len(operand.sizes)
    steps: list[StrideTerm] = []  # the innermost first
    for dim in reversed(range(len(sizes))):
        size = operand.sizes[dim - missing] if dim >= missing else ONE
        if not is_equal(size, sizes[dim]):
            steps.append(NOWHERE)
        elif dim >= missing:
            steps.append(StrideTerm(operand=(0, dim - missing)))
        elif steps[-1] is NOWHERE:
            steps.append(NOWHERE)
        else:
            steps.append(replace(steps[-1], inside=(*steps[-1].inside, dim + 1), at_least_one=False))
    return tuple(reversed(steps))


def indexed(operands: Sequence[Placed], sizes: tuple[Index, ...], dims: Sequence[int]) -> Steps:
    """`x[:, i, j]`: an iteration over the operand, which is the same along the dimensions that are indexed, and over
    the indices. Their dimensions stand where those were that are indexed, or in front if these are not neighbours."""
    source, *indices = operands
    rest = [dim for dim in range(len(source.sizes)) if dim not in dims]
    before = dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0
    after = len(rest) - before
    common = sizes[before : len(sizes) - after]
    kept = [source.strides[dim] for dim in rest]
    iterated = [Placed(sizes, (*kept[:before], *[ZERO] * len(common), *kept[before:]))]
    for each in indices:
        whole = made_by(expanded, each, common) if each.sizes != common else each
        iterated.append(made_by(viewed, whole, (*[ONE] * before, *common, *[ONE] * after)))
    return elementwise(iterated, sizes)


def viewed(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`view`: dimensions that lie one in the other are cut anew, those of one go with the ones inside of them."""
    (operand,) = operands
    if has_no_elements(operand):
        same = len(sizes) == len(operand.sizes) and all(map(is_equal, sizes, operand.sizes))
        return same_as(operand) if same else contiguous_steps(len(sizes))
    steps: dict[int, StrideTerm] = {}
    dim, start, left = len(sizes) - 1, len(operand.sizes) - 1, list(range(len(operand.sizes)))
    while left:
        run_size = operand.sizes[left.pop()]
        while left and (
            is_equal(operand.sizes[left[-1]], ONE)
            or is_equal(operand.strides[left[-1]], run_size * operand.strides[start])
        ):
            run_size = run_size * operand.sizes[left.pop()]
        view_size: Index = ONE
        inside: tuple[int, ...] = ()
        while dim >= 0 and (is_less(view_size, run_size) or is_equal(sizes[dim], ONE)):
            steps[dim] = StrideTerm(operand=(0, start), inside=inside, at_least_one=False)
            view_size, inside, dim = view_size * sizes[dim], (dim, *inside), dim - 1
        if not is_equal(view_size, run_size):
            raise Undecided("how the dimensions of a view are cut")
        start = len(left) - 1
    return tuple(steps.get(place, StrideTerm()) for place in range(len(sizes)))


def narrowed(operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`constant_pad_nd` by widths that are not positive: a copy of a part."""
    return like_operand([Placed(sizes, operands[0].strides)], sizes)


def turned(operands: Sequence[Placed], sizes: tuple[Index, ...], turns: int, dims: tuple[int, int]) -> Steps:
    """`rot90`: a copy, two dimensions of which change places with every second turn."""
    if turns % 4 == 0:
        return contiguous_steps(len(sizes))
    places = list(range(len(sizes)))
    if turns % 2:
        first, second = dims
        places[first], places[second] = places[second], places[first]
    steps = like_operand(operands, operands[0].sizes)
    return tuple(replace(steps[dim], inside=tuple(places[each] for each in steps[dim].inside)) for dim in places)


def transformed(operands: Sequence[Placed], sizes: tuple[Index, ...], dims: Sequence[int]) -> Steps:
    """`_fft_r2c` where MKL computes it: the dimension that is transformed inside, around it the others in the order of
    their strides."""
    (operand,) = operands
    if len(dims) != 1:
        raise Undecided("in which order dimensions are transformed")
    inner = dims[0] % len(sizes)
    order = [inner]  # the innermost first
    for dim in reversed(range(len(sizes))):
        if dim != inner:
            place = len(order)
            while place > 1 and is_less(operand.strides[dim], operand.strides[order[place - 1]]):
                place -= 1
            order.insert(place, dim)
    return in_order_steps(order)


def made_by(rule: Rule, operand: Placed, sizes: tuple[Index, ...]) -> Placed:
    """What a rule makes of one operand."""
    return Placed(sizes, tuple(number_of(step, [operand], sizes) for step in rule([operand], sizes)))


def same_as(operand: Placed) -> Steps:
    return tuple(StrideTerm(operand=(0, dim)) for dim in range(len(operand.sizes)))


def contiguous_steps(count: int) -> Steps:
    return tuple(StrideTerm(inside=tuple(range(dim + 1, count))) for dim in range(count))


def in_order_steps(order: Sequence[int]) -> Steps:
    """Dimensions in an order, the innermost first. A size of 0 makes all strides outside of it 0."""
    inside = {dim: tuple(order[:place]) for place, dim in enumerate(order)}
    return tuple(StrideTerm(inside=inside[dim], at_least_one=False) for dim in range(len(order)))


# --- questions --------------------------------------------------------------------------------------------------------


def is_less(left: Index, right: Index) -> bool:
    if left is right:
        return False
    left, right = without_common_factors(left, right)
    if never_negative(right - left - 1):
        return True
    if never_negative(left - right):
        return False
    raise Undecided(f"whether {left} is less than {right}")


def without_common_factors(left: Index, right: Index) -> tuple[Index, Index]:
    """Two numbers in the same order: `s1*s2` and `s0*s1*s2` are as 1 and `s0`, since sizes that matter are not 0."""
    factors, others = factors_of(left), factors_of(right)
    for each in list(factors):
        if each.low is not None and each.low > 0 and each in others:
            factors.remove(each)
            others.remove(each)
    return as_index(math.prod(factors)), as_index(math.prod(others))


def factors_of(index: Index) -> list[Index]:
    if isinstance(index, Product):
        return list(index.factors)
    if isinstance(index, Sum) and not index.constant and len(index.terms) == 1:
        ((item, factor),) = index.terms
        return [number(factor), *factors_of(item)]
    return [index]


def is_equal(left: Index, right: Index) -> bool:
    return not is_less(left, right) and not is_less(right, left)


def is_contiguous(operand: Placed) -> bool:
    return has_no_elements(operand) or lies_in(operand, tuple(reversed(range(len(operand.sizes)))))


def has_no_elements(operand: Placed) -> bool:
    return any(is_equal(size, ZERO) for size in operand.sizes)


def lies_in(operand: Placed, order: Sequence[int]) -> bool:
    """Whether the dimensions lie one in the other, the innermost first, those of one element anywhere."""
    expected: Index = ONE
    for dim in order:
        if is_equal(operand.sizes[dim], ONE):
            continue
        if not is_equal(operand.strides[dim], expected):
            return False
        expected = expected * operand.sizes[dim]
    return True


def is_dense(operand: Placed) -> bool:
    """Whether it has all of its memory, each element once, in whatever order."""
    if has_no_elements(operand):
        return True
    left = [dim for dim, size in enumerate(operand.sizes) if not is_equal(size, ONE)]
    expected: Index = ONE
    while left:
        inner = next((dim for dim in left if operand.strides[dim] is expected), None)
        if inner is None:
            inner = next((dim for dim in left if is_equal(operand.strides[dim], expected)), None)
        if inner is None:
            return False
        left.remove(inner)
        expected = expected * operand.sizes[inner]
    return True


def spread(operand: Placed, sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    """The strides of an operand along the dimensions of the result: 0 where it is broadcast."""
    missing = len(sizes) - len(operand.sizes)
    own = (
        ZERO if is_equal(size, ONE) and not is_equal(whole, ONE) else stride
        for size, stride, whole in zip(operand.sizes, operand.strides, sizes[missing:], strict=True)
    )
    return (*[ZERO] * missing, *own)


def in_order(sizes: tuple[Index, ...], strides: Sequence[tuple[Index, ...]]) -> list[int]:
    """Dimensions, the innermost first, as eager sorts them: by insertion; what cannot be told stays in its place."""
    order = list(reversed(range(len(sizes))))
    for place in range(1, len(order)):
        moved = place
        for before in range(place - 1, -1, -1):
            comes_later = compared(order[before], order[moved], sizes, strides)
            if comes_later is None:
                continue
            if not comes_later:
                break
            order[before], order[moved] = order[moved], order[before]
            moved = before
    return order


def compared(first: int, second: int, sizes: tuple[Index, ...], strides: Sequence[tuple[Index, ...]]) -> bool | None:
    """Whether the first dimension belongs outside of the second: the first operand that tells decides."""
    for each in strides:
        one, other = each[first], each[second]
        if is_equal(one, ZERO) or is_equal(other, ZERO):
            continue
        if is_less(one, other):
            return False
        if is_less(other, one) or is_less(sizes[second], sizes[first]):
            return True
    return None


# --- sizes that may be 0 or 1 -----------------------------------------------------------------------------------------


def decided(rule: Rule, operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """What a rule says for all values of the symbols; `Undecided` where it says different things for different ones."""
    every = list(
        itertools.islice(cases([*sizes, *(size for each in operands for size in each.sizes)]), MAX_SIZE_CASES + 1)
    )
    if len(every) > MAX_SIZE_CASES:
        raise Undecided("too many sizes may be 0 or 1")
    candidates: list[tuple[StrideTerm, ...]] = []
    for case in every:  # the first is that of large sizes, for which it does not matter what counts as one
        there = [Placed(put(each.sizes, case), put(each.strides, case)) for each in operands]
        small = put(sizes, case)
        steps = rule(there, small)
        if not candidates:
            candidates = [(step, replace(step, at_least_one=not step.at_least_one)) for step in steps]
        for place, step in enumerate(steps):
            right = number_of(step, there, small)
            candidates[place] = tuple(each for each in candidates[place] if number_of(each, there, small) is right)
        if not all(candidates):
            raise Undecided(f"what {', '.join(f'{name} = {value}' for name, value in case.items())} makes of it")
    return tuple(each[0] for each in candidates)


def is_surely_dense(operand: Placed) -> bool:
    """Whether it is dense for all values of the symbols: (u0, 1) with strides (1, u0) is, and so is nothing of it."""
    every = list(itertools.islice(cases(operand.sizes), MAX_SIZE_CASES + 1))
    if len(every) > MAX_SIZE_CASES:
        raise Undecided("too many sizes may be 0 or 1")
    return all(is_dense(Placed(put(operand.sizes, case), put(operand.strides, case))) for case in every)


def put(numbers: tuple[Index, ...], case: Mapping[Any, Index]) -> tuple[Index, ...]:
    return tuple(substitute(each, case) for each in numbers) if case else numbers


def number_of(step: StrideTerm, operands: Sequence[Placed], sizes: tuple[Index, ...]) -> Index:
    return as_index(step.of(sizes, [each.strides for each in operands], lambda size: maximum(size, ONE)))


def cases(sizes: Sequence[Index]) -> Iterator[Mapping[Any, Index]]:
    """The symbols that may make a size 0 or 1: first as large ones, then with the values that do."""
    special: dict[Symbol, set[int]] = {}
    for size in sizes:
        if isinstance(size, Number) or (size.low is not None and size.low > 1):
            continue
        for wanted in (0, 1):
            solved = solution(size, wanted)
            if solved is not None and lowest(solved[0]) <= solved[1] <= highest(solved[0]):
                special.setdefault(solved[0], set()).add(solved[1])
    choices = [[(each, value) for value in values_of(each, found)] for each, found in special.items()]
    return (dict(case) for case in itertools.product(*choices))


def solution(size: Index, wanted: int) -> tuple[Symbol, int] | None:
    """The symbol, and its value, for which a size is what is wanted; None where that is not one value of one symbol."""
    if isinstance(size, Symbol):
        return size, wanted
    if not isinstance(size, Sum) or len(size.terms) != 1:
        return None
    ((unknown, factor),) = size.terms
    rest = wanted - size.constant
    return (unknown, rest // factor) if isinstance(unknown, Symbol) and rest % factor == 0 else None


def lowest(unknown: Symbol) -> int:
    return 0 if unknown.low is None else unknown.low


def highest(unknown: Symbol) -> float:
    return math.inf if unknown.high is None else unknown.high


def values_of(unknown: Symbol, special: set[int]) -> list[Index]:
    """A symbol beyond its special values, if it can be, and each value up to these."""
    values = range(lowest(unknown), max(special) + 1)
    if len(values) > MAX_VALUES_TRIED:
        raise Undecided(f"{unknown} has many values for which a size is small")
    large: list[Index] = []
    if max(special) < highest(unknown):
        large = [symbol(unknown.name, max(special) + 1, unknown.high, unknown.likely)]
    return [*large, *map(number, values)]
