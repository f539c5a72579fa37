"""Facts about a whole graph, kept from one pass to the next while the graph stays as it is.

Most passes find nothing, and what each would gather is what the one before gathered. Whether the graph is the same is
seen by its parts: nodes in order, what each calls and with what, and the value it stands for. Operands and values are
never edited in place, so that it is enough to see that they are the same objects.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ferrite.graph import WRITTEN_AFTER, Regions, fake_value
from ferrite.pipeline import PassContext
from ferrite.rewrite.visible import VisibleMemory


class Remembered:
    def __init__(self, graph: torch.fx.Graph, parts: list[Any]) -> None:
        self.graph, self.parts = graph, parts

    @functools.cached_property
    def sharing(self) -> VisibleMemory:
        return VisibleMemory(self.graph)

    @functools.cached_property
    def regions(self) -> Regions:
        return Regions(self.graph)


def remembered(gm: torch.fx.GraphModule, context: PassContext) -> Remembered:
    """What is known of the graph as it is now. A graph that runs others is looked at anew: they may change."""
    parts = parts_of(gm.graph)
    known = context.known
    if (
        isinstance(known, Remembered)
        and known.graph is gm.graph
        and len(known.parts) == len(parts)
        and all(map(operator.is_, known.parts, parts))
        and not any(isinstance(child, torch.fx.GraphModule) for child in gm.children())
    ):
        return known
    context.known = found = Remembered(gm.graph, parts)
    return found


def parts_of(graph: torch.fx.Graph) -> list[Any]:
    found: list[Any] = []
    for node in graph.nodes:
        found += (node, node.target, node.args, node.kwargs, fake_value(node), node.meta.get(WRITTEN_AFTER))
    return found
