"""Tensors whose numbers are to be conjugated or negated when they are read: a bit of the tensor says so.

Values here are the numbers themselves. Where such a tensor comes in, they are copied; where it leaves the program, the
bit is put back.
"""

from __future__ import annotations

import torch

from ferrite.capture import torch_operators
from ferrite.ir import arithmetic_type, cast, op
from ferrite.lower.builder import Builder
from ferrite.lower.calls import eager_call
from ferrite.lower.memory import copied
from ferrite.lower.value import Value

aten = torch.ops.aten
COPIED = "its numbers are read as others than they are"
REASON = "a view whose numbers are read as others than they are"


def resolved_later(ctx: Builder, value: Value, fake: torch.Tensor) -> Value:
    """The value as eager returns it: the opposite numbers in memory, under a view with the bit set."""
    if value.box.buffer is not None and ctx.buffers[ctx.buffers[value.box.buffer].storage].kind != "owned":
        return value  # memory that came in has the bits it came with
    name, view = ("conj", aten._conj.default) if fake.is_conj() else ("neg", aten._neg_view.default)
    element = op(name, cast(ctx.elements(value, value.sizes), arithmetic_type(value.dtype)))
    numbers = ctx.lazy(value.sizes, cast(element, value.dtype), value.device)
    plain = copied(ctx, numbers, ctx.sizes.indices(fake.stride()))
    seen: Value = eager_call(ctx, view, (plain,), {}, fake, REASON)
    return seen


def resolved_now(ctx: Builder, value: Value, node: torch.fx.Node) -> Value:
    """The numbers of a tensor that comes in, in memory of our own; not where it is written to, or returned as it is."""
    users = [user for user in node.users if user.op == "output" or torch_operators.written_arguments(user.target)]
    if users or value.fake is None:
        return value
    plain = torch.empty_like(value.fake)
    copy: Value = eager_call(ctx, aten.clone.default, (value,), {}, plain, COPIED)
    return copy
