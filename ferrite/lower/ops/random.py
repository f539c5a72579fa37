"""Random numbers. Those of torch's generators are drawn by eager, in the order of the graph; those that a counter gives
are expressions like any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import (
    ZERO,
    Index,
    Random,
    arithmetic_type,
    const,
    contiguous_strides,
    number,
    op,
)
from ferrite.ir.program import Seeds
from ferrite.lower.builder import Builder
from ferrite.lower.calls import eager_call
from ferrite.lower.cuda_random import DTYPES as CUDA_DTYPES
from ferrite.lower.cuda_random import draw_for_distribution, draw_for_dropout
from ferrite.lower.formula import Term, choose, larger, log1p, pointwise, result, sqrt
from ferrite.lower.memory import dense_strides
from ferrite.lower.ops.create import filled
from ferrite.lower.table import DRAWN, lowers, lowers_later
from ferrite.lower.value import Box, Value, own_axes, whole

aten = torch.ops.aten


@lowers(aten.native_dropout.default)
def native_dropout(ctx: Builder, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    """On the CPU, eager draws the mask as `bernoulli_` does; the rest is arithmetic. On a GPU all of it can be."""
    kept, mask_fake = ctx.out
    if train is False:
        ctx.out = mask_fake
        mask = filled(ctx, True)
        ctx.out = kept
        return ctx.lazy(x.sizes, ctx.elements(x, x.sizes), x.device), mask
    if x.device.type == "cuda":
        return cuda_dropout(ctx, x, p)
    if x.device.type != "cpu" or x.dtype.is_complex:
        raise NotLowered("its mask comes from a generator of the device")
    box = Box(x.sizes, torch.bool, x.device, origins=(ctx.origin,))
    box.buffer = ctx.new_buffer(box, dense_strides(ctx, mask_fake))
    mask = eager_call(ctx, aten.bernoulli_.float, (whole(box), 1 - p), {}, mask_fake, DRAWN)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    ctx.out = kept
    return pointwise(ctx, lambda value, hit, factor: value * hit * factor, x, numbers=[mask, scale]), mask


def cuda_dropout(ctx: Builder, x: Value, p: float) -> tuple[Value, Value]:
    """As torch's kernel does it, in float: an element is kept where a number from 0 to 1 is below the chance."""
    kept, mask_fake = ctx.out
    if not 0 < p < 1:
        raise NotLowered("nothing is dropped, or everything")
    chance = rounded(1 - p)
    value = Term(ctx.elements(x, x.sizes)).to(torch.float32)
    drawn = Term(draw_for_dropout(ctx, x))  # from here on nothing is refused: the generator has moved
    ctx.out = mask_fake
    mask = result(ctx, drawn < chance)
    if ctx.is_used(1):  # by the backward part: now, where it is drawn for the result
        ctx.realise(mask.box)
    ctx.out = kept
    hit = Term(ctx.elements(mask, x.sizes)).to(torch.float32)
    return result(ctx, value * hit * rounded(1 / chance)), mask


@lowers(aten.rand.default, aten.rand_like.default)
def rand(ctx: Builder, *args: Any, **kwargs: Any) -> Value:
    return drawn_between(ctx, 0.0, 1.0)


@lowers(aten.uniform.default)
def uniform(ctx: Builder, x: Value, low: Any, to: Any, generator: Any) -> Value:
    if generator is not None or not isinstance(low, float) or not isinstance(to, float):
        raise NotLowered(DRAWN)
    return drawn_between(ctx, low, to)


def drawn_between(ctx: Builder, low: float, high: float) -> Value:
    """As torch's kernel does it on a GPU, in float: what is rounded to the upper bound is the lower one instead. Its
    product and sum are one instruction with one rounding; so they are here where the product is exact."""
    dtype = ctx.out_dtype
    if dtype not in CUDA_DTYPES:
        raise NotLowered(DRAWN)
    low, high = rounded(low, dtype), rounded(high, dtype)
    span = rounded(rounded(high - low), dtype)
    if not math.isfinite(span) or math.frexp(span)[0] != 0.5:
        raise NotLowered("what is drawn is rounded as torch's kernel alone rounds")
    drawn = Term(draw_for_distribution(ctx))
    value = (drawn * span + low).to(dtype).to(torch.float32)
    return in_memory(ctx, result(ctx, choose(value.equals(high), low, value)))


@lowers(aten.bernoulli.p)
def bernoulli(ctx: Builder, x: Value, p: Any, generator: Any) -> Value:
    """As torch's kernel does it on a GPU; types that it draws doubles for are left to it."""
    is_chance = isinstance(p, float) and 0 <= p <= 1
    if generator is not None or ctx.out_dtype not in DRAWN_IN_FLOAT or not is_chance:
        raise NotLowered(DRAWN)
    return in_memory(ctx, result(ctx, Term(draw_for_distribution(ctx)) < rounded(p)))


DRAWN_IN_FLOAT = (*CUDA_DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)


def in_memory(ctx: Builder, drawn: Value) -> Value:
    """Numbers that may be read at more points than there are of them, which costs more than to keep them."""
    ctx.realise(drawn.box)
    return drawn


def rounded(value: float, dtype: torch.dtype = torch.float32) -> float:
    """To the nearest number of a type."""
    return float(const(value, dtype).value)


# --- by counting ------------------------------------------------------------------------------------------------------


@lowers_later("ferrite.random_key.default")
def random_key(ctx: Builder, number: int, device: torch.device) -> Value:
    box = Box(ctx.out_sizes, ctx.out_dtype, ctx.out.device, origins=(ctx.origin,))
    box.buffer = ctx.new_buffer(box)
    ctx.add(Seeds(box.buffer, ctx.origin))
    return whole(box)


class Stream:
    """The numbers of one random operator, over the elements of its result."""

    def __init__(self, ctx: Builder, key: Value, operator: int, sizes: Sequence[Index]) -> None:
        words = [key.at([number(place)]) for place in (0, 1)]
        self.seed = op("bitwise_or", words[0], op("bitwise_left_shift", words[1], const(32, torch.int64)))
        self.stream = number(operator)
        place: Index = ZERO
        for axis, stride in zip(own_axes(sizes), contiguous_strides(sizes), strict=True):
            place = place + axis * stride
        self.place = place

    def draw(self, kind: str, place: Index, dtype: torch.dtype) -> Term:
        return Term(Random.intern(kind, self.seed, place, self.stream, dtype))

    def uniform(self, dtype: torch.dtype) -> Term:
        return self.draw("uniform", self.place, dtype)

    def normal(self, dtype: torch.dtype) -> Term:
        """By the method of Box and Muller, from two numbers in double precision."""
        first, second = (self.draw("uniform", self.place * 2 + each, torch.float64) for each in (0, 1))
        return (sqrt(-2 * log1p(-first)) * (2 * math.pi * second).call("cos")).to(dtype)

    def exponential(self, dtype: torch.dtype) -> Term:
        """With rate 1; never 0, by which people divide."""
        drawn = (-log1p(-self.uniform(torch.float64))).to(dtype)
        return larger(drawn.to(arithmetic_type(dtype)), torch.finfo(dtype).tiny).to(dtype)

    def integer(self, dtype: torch.dtype, low: int, high: int) -> Term:
        return (self.draw("bits", self.place, torch.int64).call("remainder", high - low) + low).to(dtype)


@lowers_later("ferrite.random.default")
def random(
    ctx: Builder, key: Value, index: int, size: Any, kind: str, dtype: torch.dtype, low: int, high: int
) -> Value:
    stream = Stream(ctx, key, index, ctx.out_sizes)
    if kind == "integer":
        return result(ctx, stream.integer(dtype, low, high))
    made = {"uniform": stream.uniform, "normal": stream.normal, "exponential": stream.exponential}[kind]
    return result(ctx, made(dtype))


@lowers_later("ferrite.random_hits.default")
def random_hits(ctx: Builder, key: Value, index: int, chances: Value) -> Value:
    if chances.device.type == "cpu":
        raise NotLowered("it looks for impossible chances")
    wide = torch.promote_types(chances.dtype, torch.float32)
    drawn = Stream(ctx, key, index, ctx.out_sizes).uniform(wide)
    return result(ctx, drawn < Term(ctx.elements(chances, ctx.out_sizes)).to(wide))
