"""Eager's random numbers on a GPU of NVIDIA, as expressions.

A kernel of torch that draws has at most as many threads as the GPU holds at once. Every thread has a stream of the
default generator, which counts blocks of four words for all streams together: a draw begins at one block, and moves
the generator past as many as a thread takes. `native_dropout` reads vectors of V elements:

    thread 0 takes elements 0 to V - 1, thread 1 the next V, ..., the last thread V; then it is thread 0's turn again

so that element e is drawn by thread e // V % threads, as word e // (V * threads) * V + e % V behind where the draw
began. V is as large as 16 bytes allow, where it divides the number of elements and the operand lies accordingly. (Of an
unknown number, it is what it was for the number that was seen; each call of the program asks whether it still is, and
is done operator by operator where it is not.) Where V is less than four, neighbours would share no block, which makes
a kernel slower than torch's: it stays a call.

`rand` and its like have a thread for each element, as long as there are threads; then it is thread 0's turn again:

    element e is drawn by thread e % threads, as word e // threads behind where the draw began

Here neighbours never share a block. Up to as many elements as threads, torch's kernel makes no fewer blocks than ours
does; of more, ours would make four times as many, and it stays a call, unless nobody knows how many there are.

Where the draws of a program begin is asked for once (`RandomState`), as long as no other operation with an effect is in
between. Torch's own calls that draw are such operations, and keep their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import NotLowered
from ferrite.ir import (
    ZERO,
    Expr,
    Index,
    Number,
    Random,
    Symbol,
    contiguous_strides,
    flat_extent,
    index_value,
    minimum,
    number,
    symbol,
    symbols_in,
)
from ferrite.ir.program import RandomState, defines, has_effect
from ferrite.lower.builder import Builder
from ferrite.lower.table import DRAWN
from ferrite.lower.value import Value, own_axes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VECTOR_BYTES = 16
MIN_VECTOR = 4  # elements: as many as a block has words
THREAD_GROUP = 256  # threads that are started together
GIVEN = ("input", "donated", "constant")
Multiples = tuple[tuple[Index, int], ...]


def draw_for_dropout(ctx: Builder, x: Value) -> Expr:
    """The number above 0, up to 1, that `native_dropout` draws for each element of its operand."""
    most = ctx.random_threads(x.device, "dropout")
    if most is None:
        raise NotLowered("its mask comes from a generator of the device")
    if x.dtype not in DTYPES:
        raise NotLowered(f"which numbers are drawn for {x.dtype} is not known")
    elements = elements_of(x.sizes)
    aligned = input_to_align(ctx, x)
    vector, multiples = vector_elements(ctx, x, elements, aligned)
    threads = threads_for(elements, most)
    seed, first = begin_draw(ctx, x.device, (elements - 1) // (threads * 4) + 1, aligned, multiples)
    counter, stream = dropout_numbers(flat_places(x.sizes), first, vector, threads)
    return Random.intern("curand_uniform", index_value(seed), counter, stream, torch.float32)


def draw_for_distribution(ctx: Builder) -> Expr:
    """The number above 0, up to 1, that `rand` and its like draw for each element of their result."""
    device = ctx.out.device
    most = ctx.random_threads(device, "distribution") if device.type == "cuda" else None
    if most is None:
        raise NotLowered(DRAWN)
    if not torch_operators.known_contiguous(ctx.out):
        raise NotLowered("which numbers are drawn for a tensor with gaps or other strides is not known")
    elements = elements_of(ctx.out_sizes)
    if torch_api.size_hint(ctx.out.numel()) > most:
        raise NotLowered("torch's kernel has fewer numbers to make for so many elements")
    threads = threads_for(elements, most)
    seed, first = begin_draw(ctx, device, (elements - 1) // (threads * 4) + 1, None)
    counter, stream = distribution_numbers(flat_places(ctx.out_sizes), first, threads)
    return Random.intern("curand_uniform", index_value(seed), counter, stream, torch.float32)


def elements_of(sizes: Sequence[Index]) -> Index:
    elements = flat_extent(sizes)
    if elements.low is None or elements.low < 1:
        raise NotLowered("for a tensor without elements nothing is drawn")
    return elements


def threads_for(elements: Index, most: int) -> Index:
    """Threads of torch's kernel, of which a GPU holds so many at most."""
    return minimum((elements + THREAD_GROUP - 1) // THREAD_GROUP, number(most // THREAD_GROUP)) * THREAD_GROUP


def flat_places(sizes: Sequence[Index]) -> Index:
    place: Index = ZERO
    for axis, stride in zip(own_axes(sizes), contiguous_strides(sizes), strict=True):
        place = place + axis * stride
    return place


def dropout_numbers(place: Any, first: Any, vector: int, threads: Any) -> tuple[Any, Any]:
    """The counter and the stream of the number drawn for an element. `first`: the block that the draw begins with."""
    return first * 4 + place // (threads * vector) * vector + place % vector, place // vector % threads


def distribution_numbers(place: Any, first: Any, threads: Any) -> tuple[Any, Any]:
    """The same for an element of a distribution."""
    return first * 4 + place // threads, place % threads


def input_to_align(ctx: Builder, x: Value) -> str | None:
    """The input of the program that an operand is, or begins where it does; None for what the program makes, which
    begins at a multiple of 16 bytes as all that torch allocates."""
    if x.box.buffer is None:
        return None
    buffer = ctx.buffers[ctx.buffers[x.box.buffer].storage]
    if buffer.kind not in GIVEN:
        return None
    if buffer.kind == "constant" or x.box.fake is None or x.fake is None:
        raise NotLowered("which numbers are drawn depends on where its operand lies")
    if ctx.index(x.fake.storage_offset()) != ctx.index(x.box.fake.storage_offset()):
        raise NotLowered("which numbers are drawn depends on where its operand lies in an input")
    return buffer.name


def vector_elements(ctx: Builder, x: Value, elements: Index, aligned: str | None) -> tuple[int, Multiples]:
    """How many elements a thread of eager's kernel reads at once, and what must be a multiple of what for that."""
    fake = x.fake
    if fake is None or not torch_operators.known_contiguous(fake):
        raise NotLowered("which numbers are drawn for a tensor with gaps or other strides is not known")
    most = VECTOR_BYTES // x.dtype.itemsize
    if aligned is None and ctx.index(fake.storage_offset()) % most is not ZERO:
        raise NotLowered("its operand does not begin at a multiple of 16 bytes")
    if elements % most is ZERO:
        return most, ()
    if isinstance(elements, Number) and elements % MIN_VECTOR is ZERO:
        return MIN_VECTOR, ()
    if ctx.given.issuperset(symbols_in(elements)) and symbols_in(elements):
        seen = torch_api.size_hint(fake.numel())
        if seen % most == 0:
            return most, ((elements, most),)
        if seen % MIN_VECTOR == 0:  # and no multiple of what is twice as much
            return MIN_VECTOR, ((elements + MIN_VECTOR, most),)
    raise NotLowered("how many elements there are is no multiple of what a thread reads at once")


def begin_draw(
    ctx: Builder, device: torch.device, blocks: Index, aligned: str | None, multiples: Multiples = ()
) -> tuple[Symbol, Symbol]:
    """The seed of a device's generator, and the block at which a draw begins that takes so many of each stream.
    `aligned`: an input that must lie at a multiple of 16 bytes; `multiples`: numbers over sizes that must be some."""
    place, inputs = ctx.random_state, (aligned,) if aligned is not None else ()
    if place is not None:
        state: Any = ctx.operations[place]
        known = {each for _symbol, taken in state.draws for each in symbols_in(taken)}
        if state.device == device and known.issuperset(symbols_in(blocks)):
            first = symbol(f"{state.seed.name}_draw{len(state.draws)}", 0)
            inputs = tuple(dict.fromkeys((*state.aligned, *inputs)))
            even = tuple(dict.fromkeys((*state.multiples, *multiples)))
            draws = (*state.draws, (first, blocks))
            ctx.operations[place] = replace(state, draws=draws, aligned=inputs, multiples=even)
            ctx.bound.add(first)
            return state.seed, first
    # as early as it can be: what is between two runs of kernels makes them two
    needed, place = frozenset(symbols_in(blocks)), len(ctx.operations)
    while place and not has_effect(ctx.operations[place - 1]) and needed.isdisjoint(defines(ctx.operations[place - 1])):
        place -= 1
    seed, first = symbol(f"seed{len(ctx.operations)}"), symbol(f"seed{len(ctx.operations)}_draw0", 0)
    ctx.operations.insert(place, RandomState(device, seed, ((first, blocks),), inputs, multiples, ctx.origin))
    ctx.random_state = place
    ctx.bound |= {seed, first}
    return seed, first
