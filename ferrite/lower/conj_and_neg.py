"""Tensors whose numbers are to be conjugated or negated when they are read: a bit of the tensor says so.

    y = x.exp()
    y.conj(), y.conj().imag      views of y: the first has the bit `conj`, the second the bit `neg`

Values here are the numbers themselves, computed like any others, and each remembers the tensor that eager has a view
of. Where such a tensor comes in, its numbers are copied; where one leaves the program, it is that view, with its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.graph import no_guards
from ferrite.ir import arithmetic_type, cast, op
from ferrite.lower.builder import Builder
from ferrite.lower.calls import eager_call
from ferrite.lower.memory import buffer_of, copied
from ferrite.lower.value import BitsOn, Box, Value, whole

aten = torch.ops.aten
COPIED = "its numbers are read as others than they are"
REASON = "a view whose numbers are read as others than they are"
VIEWS = {"conj": aten._conj.default, "neg": aten._neg_view.default}


def read_as(ctx: Builder, value: Value, bit: str) -> Value:
    """A view with a bit turned over. With none left, it is a view like any other."""
    below = without_bits(value)
    bits = below.bits ^ {bit}
    if not bits:
        return below.value
    seen = opposite(ctx, value, bit)
    seen.box.bits_on = BitsOn(below.value, bits)
    return seen


def without_bits(value: Value) -> BitsOn:
    """What eager has in memory for a value, and the bits that it is read by."""
    below = value.box.bits_on
    if below is None:
        return BitsOn(value, frozenset())
    return BitsOn(below.value.view(value.sizes, value.coordinates), below.bits)


def bits_of(fake: torch.Tensor) -> frozenset[str]:
    return frozenset(bit for bit, is_set in (("conj", fake.is_conj()), ("neg", fake.is_neg())) if is_set)


def opposite(ctx: Builder, value: Value, bit: str) -> Value:
    """The numbers conjugated, or negated."""
    element = op(bit, cast(ctx.elements(value, value.sizes), arithmetic_type(value.dtype)))
    return ctx.lazy(value.sizes, cast(element, value.dtype), value.device)


def resolved_later(ctx: Builder, value: Value, fake: torch.Tensor, shared: bool) -> Value:
    """The value as eager returns it, a view with bits set: of memory that others may see, too, if it may be `shared`,
    else of memory of its own."""
    if value.box.buffer is not None and ctx.buffers[ctx.buffers[value.box.buffer].storage].kind != "owned":
        return value  # memory that came in has the bits it came with
    bits = bits_of(fake)
    below = without_bits(value)
    if shared and below.bits == bits:
        box = Box(value.sizes, value.dtype, value.device, buffer=buffer_of(ctx, below.value, fake))
        seen = Value(box, box.sizes, whole(box).coordinates, fake)
    else:
        for bit in bits:
            value = opposite(ctx, value, bit)
        seen = copied(ctx, value, ctx.sizes.indices(fake.stride()))
    for bit in sorted(bits):
        seen = eager_call(ctx, VIEWS[bit], (seen,), {}, fake, REASON)
    return seen


def laid_out(fake: torch.Tensor, strides: Sequence[int | torch.SymInt]) -> torch.Tensor:
    """A fake tensor with the same bits and other strides."""
    mode: Any = torch_api.fake_mode_for([fake])
    with mode, torch.no_grad(), no_guards(mode):
        new = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=fake.device)
        for bit in bits_of(fake):
            new = VIEWS[bit](new)
        return new


def resolved_now(ctx: Builder, value: Value, node: torch.fx.Node) -> Value:
    """The numbers of a tensor that comes in, in memory of our own; not where it is written to, or returned as it is."""
    users = [user for user in node.users if user.op == "output" or torch_operators.written_arguments(user.target)]
    if users or value.fake is None:
        return value
    plain = torch.empty_like(value.fake)
    copy: Value = eager_call(ctx, aten.clone.default, (value,), {}, plain, COPIED)
    return copy
