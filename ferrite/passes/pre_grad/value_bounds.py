"""Between which two numbers the elements of a tensor lie, where it is made of constants alone.

    q = arange(n); m = (q[:, None] >= 0) & (q < n)         every element of q is in 0..n-1, of m in 1..1: it is True

Sizes may be symbols: a bound is a number or an expression of sizes, and nothing is decided about these. Inputs,
parameters and memory that the graph writes to have no bounds. Truth values count as 0 and 1.

Numbers must not wrap around, and floats must not be rounded: of integers both bounds are kept far from the ends of
their type, and of floats only small whole numbers are calculated with, which every type holds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from ferrite.capture import torch_api
from ferrite.graph import Storage, fake_value, says_so, storages_of
from ferrite.passes.pre_grad.predicates import SHAPE_VIEWS, is_plain
from ferrite.passes.shared.constants import FILLED, FILLS, MAX_CALLS_BEHIND, NUMBER_NAMES, ONES, ZEROS
from ferrite.rewrite import arguments_of

aten = torch.ops.aten
Number = Any  # an int, a float or a SymInt
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_EXACT_INTEGER = 256  # whole numbers up to it are exact in bfloat16, and in all wider types
# A symbolic bound is about as large as a tensor has elements, give or take plain numbers up to MAX_SHIFT: no int64 that
# lies between such bounds is near the ends of its type.
MAX_SHIFT, MOST = 2**40, 2**62


class Bounds(NamedTuple):
    """Every element is at least `low` and at most `high`."""

    low: Number
    high: Number


TRUE, FALSE, EITHER = Bounds(1, 1), Bounds(0, 0), Bounds(0, 1)

# Their elements are elements of their first operand.
MOVES = SHAPE_VIEWS | {
    *(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.repeat.default),
    *(aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.t.default),
    *(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default),
}
CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.type_as.default})


def never_less(one: Number, other: Number) -> bool:
    return torch_api.known_true(one >= other)


def always_more(one: Number, other: Number) -> bool:
    return torch_api.known_true(one > other)


def compared(certain: Callable[[Bounds, Bounds], bool], never: Callable[[Bounds, Bounds], bool]) -> Any:
    return lambda one, other: TRUE if certain(one, other) else FALSE if never(one, other) else EITHER


def apart(one: Bounds, other: Bounds) -> bool:
    return always_more(one.low, other.high) or always_more(other.low, one.high)


def one_number(one: Bounds, other: Bounds) -> bool:
    ends = (one.low, one.high, other.low, other.high)
    return all(torch_api.known_equal(each, ends[0]) for each in ends)


at_least = compared(lambda a, b: never_less(a.low, b.high), lambda a, b: always_more(b.low, a.high))
greater = compared(lambda a, b: always_more(a.low, b.high), lambda a, b: never_less(b.low, a.high))
equal = compared(one_number, apart)
COMPARISONS: Mapping[Any, Callable[[Bounds, Bounds], Bounds]] = {
    **dict.fromkeys((aten.ge.Scalar, aten.ge.Tensor), at_least),
    **dict.fromkeys((aten.gt.Scalar, aten.gt.Tensor), greater),
    **dict.fromkeys((aten.le.Scalar, aten.le.Tensor), lambda a, b: at_least(b, a)),
    **dict.fromkeys((aten.lt.Scalar, aten.lt.Tensor), lambda a, b: greater(b, a)),
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), equal),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), lambda a, b: inverted(equal(a, b))),
}


def inverted(truth: Bounds) -> Bounds:
    return Bounds(1 - truth.high, 1 - truth.low)


def truth_of(found: Bounds) -> Bounds:
    return inverted(equal(found, FALSE))


BITWISE = (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default)
NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
LOGICAL: Mapping[Any, Callable[..., Bounds]] = {
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor), lambda a, b: Bounds(*map(min, a, b))),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), lambda a, b: Bounds(*map(max, a, b))),
    **dict.fromkeys(NEGATIONS, inverted),
}


def product(one: Bounds, other: Bounds) -> Bounds | None:
    ends = [a * b for a in one for b in other if is_number(a) and is_number(b)]
    return Bounds(min(ends), max(ends)) if len(ends) == 4 else None


ARITHMETIC: Mapping[Any, Callable[[Bounds, Bounds], Bounds | None]] = {
    aten.add.Tensor: lambda a, b: Bounds(a.low + b.low, a.high + b.high),
    **dict.fromkeys((aten.sub.Tensor, operator.sub), lambda a, b: Bounds(a.low - b.high, a.high - b.low)),
    **dict.fromkeys((aten.rsub.Scalar, torch.rsub), lambda a, b: Bounds(b.low - a.high, b.high - a.low)),
    aten.mul.Tensor: product,
}
CHOICES = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar})


class ValueBounds:
    """The bounds of values in a graph that writes into some memory: of what lies there nothing is known."""

    def __init__(self, written: frozenset[Storage]) -> None:
        self.written = written
        self.found: dict[torch.fx.Node, Bounds | None] = {}

    def of(self, item: Any) -> Bounds | None:
        """Of a number, or of all elements of a tensor; None where nothing is known."""
        if isinstance(item, (bool, int, float)):
            return Bounds(item, item) if not math.isnan(item) else None
        if not isinstance(item, torch.fx.Node):
            return None
        if item not in self.found:
            self.found[item] = None
            if len(self.found) <= MAX_CALLS_BEHIND:
                self.found[item] = self.computed(item)
        return self.found[item]

    def computed(self, node: torch.fx.Node) -> Bounds | None:
        value = fake_value(node)
        if isinstance(value, (int, torch.SymInt)):
            return Bounds(value, value)
        if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
            return None
        if not is_plain(value) or value.dtype not in (torch.bool, *INTEGERS, *FLOATS):
            return None
        if says_so(node) or not self.written.isdisjoint(storages_of(node)):
            return None
        found = constructed(node) or self.calculated(node)
        return found if found is not None and fits(found, value.dtype) else None

    def calculated(self, node: torch.fx.Node) -> Bounds | None:
        """What a call makes of operands within bounds."""
        target, dtype = node.target, fake_value(node).dtype
        if target is operator.getitem:
            return self.of(node.args[0]) if takes_a_part(node) else None
        if target in MOVES:
            return self.of(node.args[0])
        if target in CASTS:
            return cast(self.of(node.args[0]), dtype)
        if target in CHOICES or target in FILLS:
            return self.chosen(node)
        if target not in COMPARISONS and target not in LOGICAL and target not in ARITHMETIC:
            return None
        given = arguments_of(node)
        items = list(given.values())[: 1 if target in NEGATIONS else 2]
        operands = [found for found in map(self.of, items) if found is not None]
        if len(operands) != len(items) or given.get("alpha", 1) != 1:
            return None
        tensors = [value for value in map(fake_value, node.all_input_nodes) if isinstance(value, torch.Tensor)]
        if any(each.is_floating_point() for each in tensors) or any(
            isinstance(end, float) for end in sum(operands, ())
        ):
            return float_result(target, operands, dtype)
        if any(isinstance(fake_value(each), torch.SymInt) for each in node.all_input_nodes) and target in ARITHMETIC:
            return None  # a number that the caller gives may be so large that a sum wraps around
        return integer_result(target, operands, {dtype, *(each.dtype for each in tensors)} - {torch.bool})

    def chosen(self, node: torch.fx.Node) -> Bounds | None:
        """What a mask leaves of two values, or of one that is filled."""
        given = arguments_of(node)
        if node.target in FILLS:
            mask, if_true, if_false = given["mask"], given["value"], given["self"]
        else:
            mask, if_true, if_false = given["condition"], given["self"], given["other"]
        truth = self.of(mask)
        if truth not in (TRUE, FALSE):
            return None
        return cast(self.of(if_true if truth == TRUE else if_false), fake_value(node).dtype)


def integer_result(target: Any, operands: Sequence[Bounds], dtypes: Set[torch.dtype]) -> Bounds | None:
    """Of integers and truth values. Numbers are converted to the type of the tensor beside them: uint8 has no -1."""
    if target in LOGICAL:
        logical = target not in BITWISE or not dtypes
        return LOGICAL[target](*map(truth_of, operands)) if logical else None
    if not all(fits(each, dtype) for each in operands for dtype in dtypes):
        return None
    if target in COMPARISONS:
        return COMPARISONS[target](*operands)
    symbolic = [each for each in operands if not all(map(is_number, each))]
    if not dtypes or len(symbolic) > 1:
        return None
    if symbolic and any(abs(end) > MAX_SHIFT for each in operands for end in each if is_number(end)):
        return None
    return ARITHMETIC[target](*operands)


def float_result(target: Any, operands: Sequence[Bounds], dtype: torch.dtype) -> Bounds | None:
    if all(map(is_exact, operands)):
        return integer_result(target, operands, {torch.int64}) if target not in BITWISE else None
    if target is aten.mul.Tensor and dtype in FLOATS and any(is_exact(each) and each == FALSE for each in operands):
        most = torch.finfo(dtype).max  # beyond it a number would be infinite, and its product with 0 none
        return FALSE if all(is_number(end) and abs(end) <= most for each in operands for end in each) else None
    return None


def takes_a_part(node: torch.fx.Node) -> bool:
    """x[0], x[:, None], x[..., 1:]: not an element of a list, nor what a tensor selects."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    plain = all(each is None or each is ... or isinstance(each, (int, slice)) for each in index)
    return plain and isinstance(fake_value(node.args[0]), torch.Tensor)  # type: ignore[arg-type]


def constructed(node: torch.fx.Node) -> Bounds | None:
    """What a call fills new memory with."""
    target, dtype = node.target, fake_value(node).dtype
    if target is torch.arange:
        return counted(node) if dtype in INTEGERS else None
    if target in ZEROS or target in ONES:
        return TRUE if target in ONES else FALSE
    if target not in FILLED:
        return None
    number = next((node.kwargs[name] for name in NUMBER_NAMES if name in node.kwargs), None)
    if number is None and len(node.args) > FILLED[target]:
        number = node.args[FILLED[target]]
    if not isinstance(number, (bool, int, float)) or math.isnan(number):
        return None
    return cast(Bounds(number, number), dtype)


def counted(node: torch.fx.Node) -> Bounds | None:
    """arange(end), arange(start, end), arange(start, end, step)"""
    names = ("end",) if len(node.args) == 1 else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    start, end, step = torch.fx.node.map_arg((given["start"], given["end"], given["step"]), fake_value)
    if type(start) is not int or type(step) is not int or not 0 < abs(step) <= MAX_EXACT_INTEGER:
        return None
    if abs(start) > MAX_SHIFT or not isinstance(end, (int, torch.SymInt)):
        return None
    return Bounds(start, end - 1) if step > 0 else Bounds(end + 1, start)


def cast(found: Bounds | None, dtype: torch.dtype) -> Bounds | None:
    if found is None:
        return None
    if dtype is torch.bool:
        return truth_of(found)
    if dtype in INTEGERS:
        return found if is_exact(found) or not any(isinstance(end, float) for end in found) else None
    return found if is_exact(found) or is_infinite(found) else None


def fits(found: Bounds, dtype: torch.dtype) -> bool:
    """Whether a type holds what lies between the bounds, whatever the sizes are."""
    if dtype is torch.bool:
        return all(map(is_number, found))
    if dtype in FLOATS:
        return is_exact(found) or is_infinite(found)
    low, high = (-MOST, MOST) if dtype is torch.int64 else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return all(low <= end <= high if is_number(end) else dtype is torch.int64 for end in found)


def is_number(end: Number) -> bool:
    return isinstance(end, (int, float))


def is_exact(found: Bounds) -> bool:
    """Whether the bounds are whole numbers that every type of floats holds."""
    return all(is_number(end) and abs(end) <= MAX_EXACT_INTEGER and end == int(end) for end in found)


def is_infinite(found: Bounds) -> bool:
    return all(is_number(end) and math.isinf(end) for end in found) and bool(found.low == found.high)
