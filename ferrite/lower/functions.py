"""Functions of elements that an operator is given as graphs: what they make of values, as expressions.

Types follow the values that come in, as in eager, whatever the graph was traced with: a score is a float of 32 bits
there, though queries have 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.errors import NotLowered
from ferrite.graph import fake_value
from ferrite.ir import Expr
from ferrite.lower.apply import apply, composition
from ferrite.lower.builder import Builder
from ferrite.lower.inputs import attribute
from ferrite.lower.value import Box, Value


def element(ctx: Builder, expr: Expr, device: torch.device, mode: Any) -> Value:
    """An argument of a function: a tensor without dimensions."""
    box = Box((), expr.dtype, device, expr=expr)
    with mode:
        fake = torch.empty((), dtype=expr.dtype, device=device)
    return Value(box, (), (), fake)


def results_of_function(ctx: Builder, gm: Any, given: Sequence[Any], mode: Any) -> list[Expr | None]:
    """What a graph returns for these arguments, one expression each; None where it returns nothing there."""
    if not isinstance(gm, torch.fx.GraphModule):
        raise NotLowered("a function that is no graph")
    inner = Builder(gm.graph, ctx.kernels_on, outer=ctx)
    inner.buffers, inner.origin = ctx.buffers, ctx.origin
    values: dict[torch.fx.Node, Any] = {}
    arguments = iter(given)
    with torch.no_grad(), composition(ctx, mode):
        for node in gm.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = next(arguments)
                case "get_attr":
                    values[node] = attribute(inner, gm, node)
                case "call_function":
                    values[node] = called(inner, node, values, mode)
    results = [None if node is None else values[node] for node in outputs_of(gm)]
    if inner.operations:
        raise NotLowered("a function that is no expression of its arguments")
    return [None if value is None else expression(value) for value in results]


def outputs_of(gm: torch.fx.GraphModule) -> Sequence[Any]:
    found: Any = gm.graph.output_node().args[0]
    return found if isinstance(found, (tuple, list)) else [found]


def called(inner: Builder, node: torch.fx.Node, values: dict[torch.fx.Node, Any], mode: Any) -> Any:
    if not torch_operators.is_operator(node.target):
        raise NotLowered(f"a function that calls {node.target}")
    inner.node = node
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if any(user.op == "output" for user in node.users) and isinstance(fake_value(node), (tuple, list)):
        raise NotLowered("a function that returns several values as one")
    fakes = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: fake_of(values[each]))
    with mode:
        out = node.target(*fakes[0], **fakes[1])  # type: ignore[operator]
    return apply(inner, node.target, args, kwargs, out)


def fake_of(value: Any) -> Any:
    if not isinstance(value, Value):
        return value
    if value.fake is None:
        raise NotLowered("an operand without a fake value")
    return value.fake


def expression(value: Any) -> Expr:
    if not isinstance(value, Value) or value.sizes:
        raise NotLowered("a function whose result is not one element")
    return value.at(())
