"""A pattern: what the left side of a rule looks like, traced once from an ordinary function.

pattern = PatternCall(target, arguments by name, users allowed)
        | Variable(name)              binds any argument; equal names must bind equal values
        | PatternLiteral(value)
        | Items((pattern, ...))       a list or tuple written out
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.rewrite.arguments import named_arguments


@dataclass(frozen=True)
class Variable:
    name: str


@dataclass(frozen=True)
class PatternLiteral:
    value: Any = field(hash=False)


@dataclass(frozen=True)
class Items:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class PatternCall:
    """`index` tells two equal calls of one pattern apart; `uses` is how often the pattern itself reads the result."""

    target: Any
    arguments: tuple[tuple[str, Any], ...]
    index: int
    uses: int

    def __str__(self) -> str:
        return str(self.target)


@dataclass(frozen=True)
class Pattern:
    """`roots` are the results that a match replaces, in the order the function returned them."""

    variables: tuple[str, ...]
    roots: tuple[PatternCall, ...]
    calls: tuple[PatternCall, ...]

    @property
    def anchor(self) -> PatternCall:
        """The root from which matching starts: the one traced last, since the others lie before or beside it."""
        return max(self.roots, key=lambda call: call.index)


def trace_pattern(before: Callable[..., Any]) -> Pattern:
    """Run the left side once on stand-ins."""
    names = tuple(inspect.signature(before).parameters)
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {name: torch.fx.Proxy(graph.placeholder(name), tracer) for name in names}
    result = before(**proxies)
    results = result if isinstance(result, tuple) else (result,)
    graph.output(tuple(item.node for item in results))
    made: dict[torch.fx.Node, Any] = {}
    for index, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            made[node] = Variable(str(node.target))
        elif node.op == "call_function":
            made[node] = _call(node, index, made)
    roots = tuple(made[item.node] for item in results)
    if not all(isinstance(root, PatternCall) for root in roots):
        raise ValueError("the left side of a rule must end in calls")
    calls = tuple(item for item in made.values() if isinstance(item, PatternCall))
    return Pattern(names, roots, calls)


def _call(node: torch.fx.Node, index: int, made: dict[torch.fx.Node, Any]) -> PatternCall:
    if hasattr(node.target, "overloads"):
        raise ValueError(f"a rule names the overload: {node.target}.default, say")
    named = named_arguments(node.target, node.args, node.kwargs)
    arguments = tuple((name, _argument(value, made)) for name, value in named.items())
    return PatternCall(
        node.target, arguments, index, sum(count_uses(user, node) for user in node.users if user.op != "output")
    )


def _argument(value: Any, made: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return made[value]
    if isinstance(value, (list, tuple)):
        return Items(tuple(_argument(item, made) for item in value))
    return PatternLiteral(value)


def count_uses(user: torch.fx.Node, node: torch.fx.Node) -> int:
    """How often one node reads another: a node used twice by one consumer has one user but two uses."""
    seen: list[torch.fx.Node] = []
    torch.fx.node.map_arg((user.args, user.kwargs), seen.append)
    return seen.count(node)
