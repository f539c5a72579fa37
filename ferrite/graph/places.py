"""The nodes of a captured graph by number, those of graphs inside it too.

Graphs that compile to the same code have the same nodes in the same order, whatever their names. So what was compiled
for one of them speaks of a line of the model, or of an object that the graph holds, by the place of a node, and finds
it again in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.errors import ModelLine
from ferrite.graph.facts import attribute_of, leaves
from ferrite.graph.model_lines import first_model_line, model_line
from ferrite.graph.regions import USER_KERNEL

Place = tuple[int, int]  # the number of a node, and of one of the things it holds


class Places:
    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.nodes = list(nodes_within(gm, set()))

    def line(self, number: int) -> ModelLine | None:
        return model_line(self.nodes[number])

    def first_line(self) -> ModelLine | None:
        return first_model_line(self.nodes)

    def object_at(self, place: Place) -> Any:
        number, leaf = place
        return things_of(self.nodes[number])[leaf]

    def index(self) -> PlaceIndex:
        """Where everything is now, for one who will edit the graph."""
        lines: dict[ModelLine, int] = {}
        things: dict[int, tuple[Any, Place]] = {}
        for number, node in enumerate(self.nodes):
            line = model_line(node)
            if line is not None:
                lines.setdefault(line, number)
            for leaf, thing in enumerate(things_of(node)):
                if not isinstance(thing, torch.fx.Node):
                    things.setdefault(id(thing), (thing, (number, leaf)))
        return PlaceIndex(lines, things)


@dataclass(frozen=True)
class PlaceIndex:
    """The places of lines and of objects. It keeps the objects alive: they are told by their identities."""

    lines: dict[ModelLine, int]
    things: dict[int, tuple[Any, Place]]

    def place_of_line(self, line: ModelLine | None) -> int | None:
        return None if line is None else self.lines.get(line)

    def place_of(self, thing: Any) -> Place | None:
        found = self.things.get(id(thing))
        return None if found is None else found[1]


def nodes_within(gm: torch.fx.GraphModule, seen: set[int]) -> Iterator[torch.fx.Node]:
    """The nodes of a graph in order, those of a graph that a node reads behind that node, once."""
    seen.add(id(gm))
    for node in gm.graph.nodes:
        yield node
        inner = attribute_of(node) if node.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule) and id(inner) not in seen:
            yield from nodes_within(inner, seen)


def things_of(node: torch.fx.Node) -> list[Any]:
    """What a node holds: the attribute it reads; or what it calls, a kernel of the user's, and the leaves of its
    arguments."""
    if node.op == "get_attr":
        return [attribute_of(node)]
    kernel = [node.meta[USER_KERNEL]] if USER_KERNEL in node.meta else []
    return [node.target, *kernel, *leaves([node.args, node.kwargs])]
