"""Matrix products of bytes with signs, exact, in 32 bits.

Four bytes that follow each other along what is summed are a word, and a step of a sum adds four products:

    c[i, j] = sum over w of dot_s8s8(x[i, 4*w : 4*w + 4], y[4*w : 4*w + 4, j])

Where the machine multiplies bytes without a sign by those with one (x86), 128 is added to each byte of the right factor
(its highest bit is turned), and what that adds to a row is taken off behind the product:

    c[i, j] = sum over w of dot_u8s8(y'[4*w : 4*w + 4, j], x[i, 4*w : 4*w + 4])  -  128 * sum of x[i]

Sums of 32 bits wrap, in eager too, so that both are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrite.ir import Expr, Index, const, number, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import in_memory
from ferrite.lower.table import lowers_later
from ferrite.lower.value import Value, own_axes
from ferrite.machines import host_machine

Place = Sequence[Index]
WORD_BYTES = 4  # bytes
HIGHEST_BITS = const(-0x7F7F7F80, torch.int32)  # 0x80808080: the highest bit of each byte, or 128 four times


@lowers_later("ferrite.byte_product.default")
def byte_product(ctx: Builder, left: Value, right: Value) -> Value:
    """Of two matrices, whose sums are a multiple of four long."""
    _, column = own_axes(ctx.out_sizes)
    left, right = in_memory(ctx, left), in_memory(ctx, right)
    (word,) = own_axes((left.sizes[-1] // WORD_BYTES,), "r")
    weights = word_of(right, lambda place: (WORD_BYTES * word + place, column))
    if host_machine().unsigned_bytes:
        weights = op("bitwise_xor", weights, HIGHEST_BITS)
    return summed_words(ctx, left, weights)


@lowers_later("ferrite.byte_product_of_panels.default")
def byte_product_of_panels(ctx: Builder, left: Value, panels: Value, columns: object) -> Value:
    """The same, of a matrix whose columns are in panels, as words; on machines that want it, with 128 added."""
    _, column = own_axes(ctx.out_sizes)
    panels = in_memory(ctx, panels)
    (word,) = own_axes((left.sizes[-1] // WORD_BYTES,), "r")
    width = panels.sizes[-2]
    weights = word_of(panels, lambda place: (column // width, word, column % width, place))
    return summed_words(ctx, in_memory(ctx, left), weights)


def word_of(matrix: Value, at: Callable[[Index], Place]) -> Expr:
    """Four bytes of a matrix: `at` tells where the first to the last are."""
    return op("pack_bytes", *(matrix.at(at(number(place))) for place in range(WORD_BYTES)), dtype=torch.int32)


def summed_words(ctx: Builder, left: Value, weights: Expr) -> Value:
    row, _ = own_axes(ctx.out_sizes)
    words = left.sizes[-1] // WORD_BYTES
    (word,) = own_axes((words,), "r")
    factor = word_of(left, lambda place: (row, WORD_BYTES * word + place))

    def total(sizes: Sequence[Index], value: Expr) -> Value:
        (result,) = add_reduce(ctx, "sum", sizes, (words,), [value], [torch.int32], left.device)
        assert result is not None
        return result

    if not host_machine().unsigned_bytes:
        return total(ctx.out_sizes, op("dot_s8s8", factor, weights))
    added = total(ctx.out_sizes[:1], op("dot_u8s8", HIGHEST_BITS, factor))
    product = total(ctx.out_sizes, op("dot_u8s8", weights, factor))
    right = op("sub", product.at(own_axes(ctx.out_sizes)), added.at((row,)))
    return ctx.lazy(ctx.out_sizes, right, left.device)
