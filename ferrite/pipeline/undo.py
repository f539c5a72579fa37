"""Take back what passes did to a module: its graph, every graph nested in it, and what hangs on these modules.

FX graphs have no undo. A `Checkpoint` notes beforehand what each node says; restoring makes a graph of these notes, and
can be done again after the next failure.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.graph import innermost_first


@dataclass(frozen=True)
class _Saved:
    """A module as it was: its graph, and everything that was set on it (submodules, constants, parameters)."""

    module: torch.fx.GraphModule
    graph: _Graph
    attributes: dict[str, Any]

    @staticmethod
    def of(module: torch.fx.GraphModule) -> _Saved:
        return _Saved(module, _Graph.of(module.graph), _shallow(module.__dict__))

    def restore(self) -> None:
        held = self.module.__dict__
        held.clear()
        held.update(_shallow(self.attributes))
        self.module.graph = self.graph.made()  # also compiles the code again


class Checkpoint:
    """A module and all graphs that it reaches, as they are now. The cost is a note of each node."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.saved = [_Saved.of(module) for module in innermost_first(gm)]

    def restore(self) -> None:
        for each in self.saved:
            each.restore()


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module; the dictionaries that it keeps parameters, buffers and submodules in as copies."""
    return {name: copy.copy(held) if isinstance(held, (dict, set)) else held for name, held in attributes.items()}


@dataclass(frozen=True)
class _Node:
    """A node as it was. Its operands are nodes of the graph it was in, whatever has become of them."""

    node: torch.fx.Node
    call: tuple[Any, ...]  # operation, target, arguments, name, type
    meta: dict[str, Any]
    hung: dict[str, Any]  # what others have hung on a node: Dynamo notes on each input where it comes from


@dataclass(frozen=True)
class _Graph:
    nodes: tuple[_Node, ...]
    codegen: Any  # how arguments are passed: in a list, as a tree

    @staticmethod
    def of(graph: torch.fx.Graph) -> _Graph:
        nodes = (
            _Node(
                node,
                (node.op, node.target, node.args, node.kwargs, node.name, node.type),
                copy.copy(node.meta),
                dict(vars(node)),
            )
            for node in graph.nodes
        )
        return _Graph(tuple(nodes), graph._codegen)

    def made(self) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        twins: dict[torch.fx.Node, torch.fx.Node] = {}
        for each in self.nodes:
            op, target, args, kwargs, name, kind = each.call
            args, kwargs = torch.fx.map_arg((args, kwargs), twins.__getitem__)
            twin = graph.create_node(op, target, args, kwargs, name, kind)
            twin.meta = copy.copy(each.meta)
            vars(twin).update({name: held for name, held in each.hung.items() if name not in vars(twin)})
            twins[each.node] = twin
        graph.set_codegen(self.codegen)
        return graph


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """An independent graph with the same names and metadata."""
    return _Graph.of(graph).made()
