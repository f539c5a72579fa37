"""What a call does besides giving results, so that it is kept though nobody reads them, and in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.graph import regions

RANDOM, ORDERED = "random", "ordered"


def effect_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The effect of calling an operator, or of the graphs it is given to run; None where there is none."""
    if torch_operators.is_random(target):
        return RANDOM
    name = torch_operators.name_of(target)
    if torch_operators.is_operator(target):
        does_nothing_else = not torch_operators.schema(target).returns and not torch_operators.written_arguments(target)
        is_ordered = target.namespace in regions.EFFECTFUL_NAMESPACES or name.startswith(regions.ASSERTIONS)
        return ORDERED if does_nothing_else or is_ordered else None
    if name in regions.RANDOM_HIGHER_ORDER:
        return RANDOM
    if name in regions.EFFECTFUL_HIGHER_ORDER:
        return ORDERED
    nodes = [node for gm in graphs_in((args, kwargs)) for node in steps(gm)]
    if any(map(regions.is_random, nodes)):
        return RANDOM
    return ORDERED if any(regions.has_effect(node) and not regions.mutates(node) for node in nodes) else None


def writes_in_graphs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call runs graphs that write to what they are given."""
    return any(regions.mutates(node) for gm in graphs_in((args, kwargs)) for node in steps(gm))


def graphs_in(tree: Any) -> Iterator[torch.fx.GraphModule]:
    if isinstance(tree, torch.fx.GraphModule):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from graphs_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from graphs_in(item)


def steps(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    return (node for node in gm.graph.nodes if node.op == "call_function")
