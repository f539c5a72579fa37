"""Where eager puts concatenations, and what it makes of them: `cat`, `stack`, `roll`.

The memory of a concatenation is contiguous, or has the channels last where all parts suggest that. A part suggests it
by the order of its strides, also of those along dimensions of one, which address nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import ONE, ZERO, Index, Number, contiguous_strides, number
from ferrite.lower.eager_strides import (
    Placed,
    Steps,
    StrideTerm,
    Undecided,
    contiguous_steps,
    has_no_elements,
    in_order_steps,
    is_equal,
    is_less,
    number_of,
    same_as,
    viewed,
)


def suggested_order(operand: Placed) -> tuple[int, ...]:
    """The dimensions, the innermost first, of memory that eager makes for something like the operand: with the channels
    last if strides grow in that order."""
    sizes, strides = operand.sizes, operand.strides
    rank = len(sizes)
    plain, by_channels = tuple(reversed(range(rank))), (1, *range(rank - 1, 1, -1), 0)
    if rank not in (4, 5) or strides[1] is ZERO or strides == contiguous_strides(sizes):
        return plain
    least: Index = ZERO
    for dim in by_channels:
        if sizes[dim] is ZERO or is_less(strides[dim], least) or (dim == 0 and is_equal(least, strides[1])):
            return plain
        least = strides[dim] * sizes[dim]
    return by_channels


def concatenated(parts: Sequence[Placed], sizes: tuple[Index, ...]) -> Steps:
    """`cat`: as all parts suggest; a part without elements suggests nothing but contiguous memory."""
    plain = tuple(reversed(range(len(sizes))))
    orders = {plain if has_no_elements(each) else suggested_order(each) for each in parts}
    return contiguous_steps(len(sizes)) if len(orders) > 1 or plain in orders else in_order_steps(orders.pop())


def stacked(operands: Sequence[Placed], sizes: tuple[Index, ...], dim: int) -> Steps:
    """`stack`: a concatenation whose dimension is cut, or one along a new dimension behind all others."""
    if dim == len(sizes) - 1:
        return concatenated([Placed((*each.sizes, ONE), (*each.strides, ONE)) for each in operands], sizes)
    joined = (*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :])
    steps = concatenated(operands, joined)
    whole = lying(steps, joined)
    if has_no_elements(whole):
        return contiguous_steps(len(sizes))
    cut = [(each,) if each < dim else (dim, dim + 1) if each == dim else (each + 1,) for each in range(len(joined))]
    found = []
    for step in viewed([whole], sizes):
        outside = () if step.operand is None else steps[step.operand[1]].inside
        found.append(StrideTerm(inside=(*(place for each in outside for place in cut[each]), *step.inside)))
    return tuple(found)


def rolled(operands: Sequence[Placed], sizes: tuple[Index, ...], shifts: Sequence[int], dims: Sequence[int]) -> Steps:
    """`roll`: two parts one after the other, along one dimension after the other, or a clone of nothing. Without
    `dims`, of all elements in a row, which is a view of these."""
    (operand,) = operands
    if has_no_elements(operand):
        return contiguous_steps(len(sizes)) if not dims and len(sizes) > 1 else same_as(operand)
    steps = contiguous_steps(len(sizes))
    for shift, dim in zip(shifts, dims, strict=False):
        steps = concatenated(parts_of_rolled(operand, shift, dim % len(sizes)), sizes)
        operand = lying(steps, sizes)
    return steps


def parts_of_rolled(operand: Placed, shift: int, dim: int) -> list[Placed]:
    size = operand.sizes[dim]
    if not isinstance(size, Number):
        plain = tuple(reversed(range(len(operand.sizes))))
        if suggested_order(of_size(operand, dim, ONE)) == plain == suggested_order(operand):
            return [operand]
        raise Undecided("whether the parts of a concatenation have their channels last")
    start = -shift % size.value
    return [of_size(operand, dim, number(each)) for each in (size.value - start, start)]


def of_size(operand: Placed, dim: int, size: Index) -> Placed:
    return Placed((*operand.sizes[:dim], size, *operand.sizes[dim + 1 :]), operand.strides)


def lying(steps: Steps, sizes: tuple[Index, ...]) -> Placed:
    return Placed(sizes, tuple(number_of(step, (), sizes) for step in steps))
