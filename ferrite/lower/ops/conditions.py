"""Conditions on indices, as scalar expressions. What bounds prove is not asked when it runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ferrite.ir import ONE, ZERO, Expr, Index, Number, const, index_value, masked, maximum, minimum, never_negative, op

B8 = torch.bool
END_OF_SLICE = 2**63 - 1  # what torch has for the end of a slice that has none
YES, NO = const(True, B8), const(False, B8)


def at_least(left: Index, right: Index) -> Expr:
    """left >= right"""
    if never_negative(left - right):
        return YES
    if never_negative(right - left - ONE):
        return NO
    return op("ge", index_value(left), index_value(right), dtype=B8)


def below(left: Index, right: Index) -> Expr:
    """left < right"""
    if never_negative(right - left - ONE):
        return YES
    if never_negative(left - right):
        return NO
    return op("lt", index_value(left), index_value(right), dtype=B8)


def same(left: Index, right: Index) -> Expr:
    difference = left - right
    if isinstance(difference, Number):
        return YES if difference is ZERO else NO
    return op("eq", index_value(left), index_value(right), dtype=B8)


def divides(step: Index, index: Index) -> Expr:
    return same(index % step, ZERO)


def every(*conditions: Expr) -> Expr:
    """All of them; those that are known fall away."""
    open_ones = [condition for condition in dict.fromkeys(conditions) if condition is not YES]
    if NO in open_ones:
        return NO
    return functools.reduce(lambda left, right: op("logical_and", left, right), open_ones) if open_ones else YES


def inside(index: Index, size: Index) -> Expr:
    """0 <= index < size"""
    return every(at_least(index, ZERO), below(index, size))


def all_inside(coordinates: Sequence[Index], sizes: Sequence[Index]) -> Expr:
    return every(*(inside(index, size) for index, size in zip(coordinates, sizes, strict=True)))


def guarded(condition: Expr, value: Expr, other: Expr) -> Expr:
    """`value`, read only where the condition holds; else `other`."""
    if condition is YES:
        return value
    return other if condition is NO else masked(condition, value, other)


def from_the_end(index: Index, size: Index) -> Index:
    """An index as Python reads it: counted from the end where it is negative."""
    if never_negative(index):
        return index
    if index.high is not None and index.high < 0:
        return index + size
    return index + size * minimum(ONE, maximum(ZERO, -index))


def clamped(index: Index, size: Index) -> Index:
    """0 <= it <= size"""
    if isinstance(index, Number) and index.value == END_OF_SLICE:
        return size
    return maximum(ZERO, minimum(index, size))
