"""Control flow: conditionals, loops and shared regions, whose bodies are programs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrite.capture import torch_operators
from ferrite.errors import NotLowered
from ferrite.ir import Axis, Param, cast
from ferrite.ir.program import Combine, If, Invoke, Size, While
from ferrite.lower.bodies import (
    Body,
    bind_result_sizes,
    body_of,
    body_operands,
    condition_of,
    expressions_of,
    results_of_bodies,
)
from ferrite.lower.builder import Builder
from ferrite.lower.calls import flat
from ferrite.lower.loops import add_scan
from ferrite.lower.table import lowers
from ferrite.lower.value import Box, Value, own_axes, whole


def lowers_higher_order(*names: str) -> Any:
    """Mark the lowering of higher-order operators, those that this torch has."""
    return lowers(*(found for name in names if (found := torch_operators.higher_order(name)) is not None))


@lowers_higher_order("cond")
def cond(ctx: Builder, pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    out = flat(ctx.out)
    bodies = [body_of(ctx, true_fn, "when_true", out), body_of(ctx, false_fn, "when_false", out)]
    symbols = shared_symbols(bodies)
    given = body_operands(ctx, operands, bodies)
    predicate = condition_of(ctx, pred)
    values, names = results_of_bodies(ctx, ctx.out)
    then, otherwise = (body.asking_for(symbols) for body in bodies)
    ctx.add(If(predicate, then, otherwise, (*given, *map(Size, symbols)), names, ctx.origin))
    bind_result_sizes(ctx, ctx.out, names)
    return values


@lowers_higher_order("while_loop", "while_loop_stack_output")
def while_loop(
    ctx: Builder,
    cond_fn: Any,
    body_fn: Any,
    carried: Sequence[Any],
    constants: Sequence[Any] = (),
    *more: Any,
    **rest: Any,
) -> Any:
    """Carried values are copied before the first iteration; what all iterations share is handed to each."""
    shapes = [value.fake if isinstance(value, Value) else None for value in carried]
    bodies = [body_of(ctx, cond_fn, "condition"), body_of(ctx, body_fn, "body", shapes)]
    symbols = shared_symbols(bodies)
    given = body_operands(ctx, [*carried, *constants], bodies)
    values, names = results_of_bodies(ctx, ctx.out)
    condition, body = (each.asking_for(symbols) for each in bodies)
    first, same = given[: len(carried)], (*given[len(carried) :], *map(Size, symbols))
    stacked = ctx.operator is torch_operators.higher_order("while_loop_stack_output")
    ctx.add(While(condition, body, first, same, names, stacked, ctx.origin))
    bind_result_sizes(ctx, ctx.out, names)
    return values


@lowers_higher_order("invoke_subgraph")
def invoke_subgraph(ctx: Builder, subgraph: Any, identifier: Any, *operands: Any) -> Any:
    return invoke(ctx, subgraph, operands, str(identifier))


@lowers_higher_order("invoke_quant", "invoke_quant_packed", "wrap", "strict_mode")
def invoke_quant(ctx: Builder, subgraph: Any, *operands: Any, **about: Any) -> Any:
    return invoke(ctx, subgraph, operands)


def invoke(ctx: Builder, subgraph: Any, operands: Sequence[Any], name: str = "region") -> Any:
    """A call of a body that other places may call too: it is lowered once."""
    body = body_of(ctx, subgraph, name if name.isidentifier() else "region")
    given = body_operands(ctx, operands, [body])
    values, names = results_of_bodies(ctx, ctx.out)
    arguments = (*given, *map(Size, body.symbols))
    ctx.add(Invoke(body.closed, arguments, names, ctx.origin))
    bind_result_sizes(ctx, ctx.out, names)
    return values if isinstance(ctx.out, (tuple, list)) else values[0]


@lowers_higher_order("associative_scan")
def associative_scan(ctx: Builder, combine_fn: Any, xs: Sequence[Value], additional_inputs: Sequence[Any] = ()) -> Any:
    """Prefixes along the first dimension; how two states are combined is an expression over both."""
    if additional_inputs:
        raise NotLowered("a combine function that takes more than two states")
    states = [parameter(x, place) for place, x in enumerate((*xs, *xs))]
    results = [
        cast(value.at(own_axes(value.sizes)), x.dtype)
        for value, x in zip(expressions_of(ctx, combine_fn, states), xs, strict=True)
    ]
    if any(isinstance(atom, Axis) for result in results for atom in result.atoms):
        raise NotLowered("a combine function that treats elements differently")
    values = [ctx.elements(x, x.sizes) for x in xs]
    combine = Combine("combine", tuple(results))
    return list(add_scan(ctx, combine, xs[0].sizes, 0, values, [x.dtype for x in xs], xs[0].device))


def parameter(x: Value, number: int) -> Value:
    """One argument of a combine function, as a tensor of the shape of one element of the scan."""
    return whole(Box(x.sizes[1:], x.dtype, x.device, expr=Param.intern(number, x.dtype)))


def shared_symbols(bodies: Sequence[Body]) -> tuple[Any, ...]:
    """What any of the bodies asks for: all are given the same."""
    return tuple(dict.fromkeys(symbol for body in bodies for symbol in body.symbols))
