"""Graphs inside a graph: the bodies of conditionals, loops and shared regions, as programs of their own.

A body is lowered once, however often it is called, in a scope of its own: everything it uses is an input. Symbols that
its graph takes from around it are inputs too, behind those it has. What it returns is memory of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.graph import fake_value
from ferrite.ir import ZERO, Expr, Index, Symbol, number, symbol, symbols_in
from ferrite.ir.program import CallArgument, Program, Ref, changed_inputs, defines, symbols
from ferrite.lower.arguments import argument
from ferrite.lower.assertions import bind_sizes
from ferrite.lower.builder import Builder
from ferrite.lower.calls import flat, new_result
from ferrite.lower.memory import buffer_of
from ferrite.lower.strides import same_strides
from ferrite.lower.value import Value
from ferrite.lower.walk import Walk

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Body:
    """A lowered body: the symbols it asks for behind its own inputs, and the places of the inputs it writes to."""

    program: Program
    symbols: tuple[Symbol, ...]
    written: frozenset[int]

    def asking_for(self, symbols: Sequence[Symbol]) -> Program:
        """The program with these symbols as further inputs, under other names where it has no use for them."""
        if not symbols:
            return self.program
        more = (item if item in self.symbols else symbol(f"{item.name}_unused") for item in symbols)
        return replace(self.program, inputs=(*self.program.inputs, *more))

    @functools.cached_property
    def closed(self) -> Program:
        """The program with the symbols that it asks for itself as inputs."""
        return self.asking_for(self.symbols)


def body_of(ctx: Builder, gm: Any, name: str, out: Sequence[Any] | None = None) -> Body:
    """A graph as a program. `out`: torch's fake value of what it returns, whose strides it then keeps to."""
    if not isinstance(gm, torch.fx.GraphModule):
        raise NotLowered("a body that is no graph")
    strides = None if out is None else [known_strides(fake) for fake in out]
    key = (gm, None if strides is None else tuple(map(str, strides)))
    if key not in ctx.bodies:
        inner = Builder(gm.graph, ctx.kernels_on, outer=ctx)
        program = Walk(gm, inner, output_strides=strides, is_body=True).run(name)
        places = {each: place for place, each in enumerate(program.inputs)}
        written = frozenset(places[changed] for changed in changed_inputs(program))
        ctx.bodies[key] = Body(program, tuple(free_symbols(program)), written)
    body: Body = ctx.bodies[key]
    return body


def known_strides(fake: Any) -> Any:
    """The strides a result must have, where they are numbers: others follow from sizes that the body decides."""
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    return tuple(fake.stride()) if all(isinstance(stride, int) for stride in fake.stride()) else None


def body_operands(ctx: Builder, values: Sequence[Any], bodies: Sequence[Body]) -> tuple[CallArgument, ...]:
    """What bodies are given: those they write to as they lie in memory, read by pending values first."""
    written = {place for body in bodies for place in body.written if place < len(values)}
    check_sharing(ctx, values, written)
    given = [body_operand(ctx, value, place in written) for place, value in enumerate(values)]
    for place in written:
        check_strides(ctx, given[place], place, bodies)
        ctx.before_write(ctx.buffers[values[place].box.buffer].storage)
    return tuple(given)


def body_operand(ctx: Builder, value: Any, is_written: bool) -> CallArgument:
    if isinstance(value, bool):
        return argument(ctx, number(int(value)))
    operand = argument(ctx, value)
    if not is_written:
        return operand
    assert isinstance(value, Value)
    assert isinstance(operand, Ref)
    if ctx.buffers[operand.name].storage != ctx.buffers[ctx.realise(value.box)].storage:
        raise NotLowered("a body that writes to an operand without strides")
    return operand


def check_strides(ctx: Builder, operand: CallArgument, place: int, bodies: Sequence[Body]) -> None:
    """Others are copied where a body expects them to lie otherwise than they do: what it writes cannot be."""
    assert isinstance(operand, Ref)
    mine = ctx.buffers[operand.name]
    for body in bodies:
        other = next((each for each in body.program.buffers if each.name == body.program.inputs[place]), None)
        if other is not None and not same_strides(mine.sizes, mine.strides, other.strides):
            raise NotLowered("a body that writes to an operand which lies otherwise than it was traced")


def check_sharing(ctx: Builder, values: Sequence[Any], written: set[int]) -> None:
    """Inside a body inputs are memory of their own: what it writes must not be seen through another operand."""
    boxes = [value.box if isinstance(value, Value) else None for value in values]
    storages = [None if box is None else ctx.buffers[ctx.realise(box)].storage for box in boxes]
    if any(storages.count(storages[place]) > 1 for place in written):
        raise NotLowered("a body that writes to an operand which shares memory with another")


def condition_of(ctx: Builder, value: Any) -> str | Index:
    """A condition as a buffer without dimensions, or a number."""
    if isinstance(value, Value):
        return buffer_of(ctx, value.view((), [ZERO] * value.rank))
    if isinstance(value, Expr):
        return ctx.realise(ctx.lazy((), value, CPU).box)
    return ctx.index(int(value) if isinstance(value, bool) else value)


def results_of_bodies(ctx: Builder, out: Any) -> tuple[list[Any], tuple[str | Symbol | None, ...]]:
    """Values for what bodies return, and the buffers and symbols they become. Numbers known already stay so."""
    values: list[Any] = []
    names: list[str | Symbol | None] = []
    for fake in flat(out):
        if isinstance(fake, torch.Tensor):
            value = new_result(ctx, fake, None)
            values.append(value)
            names.append(value.box.buffer)
            continue
        index = ctx.sizes.index(fake) if isinstance(fake, torch.SymInt) else None
        is_new = isinstance(index, Symbol) and index not in ctx.bound
        values.append(fake)
        names.append(index if is_new and isinstance(index, Symbol) else None)
        if is_new and isinstance(index, Symbol):
            ctx.bound.add(index)
    return values, tuple(names)


def bind_result_sizes(ctx: Builder, out: Any, names: Sequence[str | Symbol | None]) -> None:
    for name, fake in zip(names, flat(out), strict=True):
        if isinstance(name, str):
            bind_sizes(ctx, name, fake, "a graph", trusted=True)


def expressions_of(ctx: Builder, gm: torch.fx.GraphModule, given: Sequence[Value]) -> list[Value]:
    """What a graph makes of these values, none of it in memory."""
    inner = Builder(gm.graph, ctx.kernels_on, outer=ctx)
    inner.origin, walk = ctx.origin, Walk(gm, inner)
    values = iter(given)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = next(values)
            walk.values[node] = Value(value.box, value.sizes, value.coordinates, fake_value(node))
        elif node.op == "call_function":
            inner.node = node
            walk.values[node] = walk.lower_node(node)
        elif node.op != "output":
            raise NotLowered("a function that reads tensors besides its arguments")
    results = [walk.values.get(node) for node in flat(gm.graph.output_node().args[0])]
    expressions = [value for value in results if isinstance(value, Value) and value.box.expr is not None]
    if inner.operations or len(expressions) < len(results):
        raise NotLowered("a function that is no expression of its arguments")
    return expressions


def free_symbols(program: Program) -> list[Symbol]:
    """The symbols that a program uses and neither is given nor defines, in a stable order."""
    defined = {item for item in program.inputs if isinstance(item, Symbol)}
    used: dict[Symbol, None] = {}
    for operation in program.operations:
        used.update(dict.fromkeys(sorted(symbols(operation), key=str)))
        defined.update(defines(operation))
    indices = [index for item in program.buffers for index in (*item.sizes, *item.strides, item.offset)]
    indices += [item for item in program.outputs if isinstance(item, Index)]
    for index in indices:
        used.update(dict.fromkeys(sorted(symbols_in(index), key=str)))
    return [item for item in used if item not in defined]
