"""What comes into a program: tensors and numbers that it is given, and constants of its module."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.ir import ZERO, Symbol, symbol
from ferrite.ir.program import Bind, Buffer, Constant, Input
from ferrite.lower.assertions import bind_sums
from ferrite.lower.builder import Builder
from ferrite.lower.calls import new_foreign
from ferrite.lower.conj_and_neg import bits_of, resolved_now
from ferrite.lower.scalars import number_input
from ferrite.lower.value import Box, Value, whole


def new_input(ctx: Builder, node: torch.fx.Node, is_donated: bool) -> tuple[Input, Any]:
    """What the program is given for a placeholder, and the value that this is."""
    fake = fake_value(node)
    if isinstance(fake, torch.Tensor) and fake.layout is not torch.strided:
        return node.name, new_foreign(ctx, fake, node.name)
    if isinstance(fake, torch.Tensor):
        value = tensor_input(ctx, node.name, fake, "donated" if is_donated else "input")
        bind_symbols(ctx, node.name, fake)
        return node.name, resolved_now(ctx, value, node) if bits_of(fake) else value
    if isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool):
        index = ctx.sizes.index(fake)
        received = index if isinstance(index, Symbol) and index not in ctx.bound else symbol(node.name)
        ctx.bound.add(received)
        ctx.given.add(received)
        return received, fake
    if isinstance(fake, (float, torch.SymFloat, torch.SymBool)):
        return Constant(node.name), number_input(ctx, node.name, fake)
    return Constant(node.name), Constant(node.name)


def tensor_input(ctx: Builder, name: str, fake: torch.Tensor, kind: str) -> Value:
    box = Box(ctx.shape(fake), fake.dtype, fake.device, fake=fake)
    strides = ctx.sizes.indices(fake.stride())
    ctx.buffers[name] = Buffer(name, fake.dtype, box.sizes, strides, ZERO, fake.device, kind)  # type: ignore[arg-type]
    box.buffer = name
    return Value(box, box.sizes, whole(box).coordinates, fake)


def bind_symbols(ctx: Builder, name: str, fake: torch.Tensor) -> None:
    """Symbols that a tensor from outside carries get their values from it."""
    for query, dims in (("size", fake.shape), ("stride", fake.stride())):
        for place, dim in enumerate(dims):
            if torch_api.bare_symbol(dim) is None:
                continue
            index = ctx.sizes.index(dim)
            if isinstance(index, Symbol) and index not in ctx.bound:
                ctx.bound.add(index)
                ctx.add(Bind(index, name, query, place, ctx.origin))  # type: ignore[arg-type]


def bind_rest(ctx: Builder, inputs: Mapping[torch.fx.Node, Any]) -> None:
    """Once all inputs are there: symbols that none of them is, but some size has in it."""
    for node in inputs:
        fake = fake_value(node)
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            bind_sums(ctx, node.name, fake)


def attribute(ctx: Builder, gm: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """An object of the module; a tensor is a constant of the program."""
    value = operator.attrgetter(str(node.target))(gm)
    if not isinstance(value, torch.Tensor):
        return value
    fake = fake_value(node)
    name = name_of_constant(ctx, node.name, value)
    ctx.objects[name] = value
    return tensor_input(ctx, name, fake if isinstance(fake, torch.Tensor) else value, "constant")


def name_of_constant(ctx: Builder, name: str, value: torch.Tensor) -> str:
    """The node's name, unless the graph around this one has another constant under it."""
    while ctx.objects.get(name, value) is not value:
        name += "_"
    return name
