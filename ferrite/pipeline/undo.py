"""Take back what passes did to a module: its graph, every graph nested in it, and what hangs on these modules.

FX graphs have no undo. A `Checkpoint` holds copies made beforehand; restoring puts fresh copies of those copies back,
so that it can be done again after the next failure.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.graph.facts import innermost_first


@dataclass(frozen=True)
class _Saved:
    """A module as it was: its graph, and everything that was set on it (submodules, constants, parameters)."""

    module: torch.fx.GraphModule
    graph: torch.fx.Graph
    attributes: dict[str, Any]

    @staticmethod
    def of(module: torch.fx.GraphModule) -> _Saved:
        return _Saved(module, copy_graph(module.graph), _shallow(module.__dict__))

    def restore(self) -> None:
        held = self.module.__dict__
        held.clear()
        held.update(_shallow(self.attributes))
        self.module.graph = copy_graph(self.graph)  # also compiles the code again


class Checkpoint:
    """A module and all graphs that it reaches, as they are now. The cost is one copy of each node."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.saved = [_Saved.of(module) for module in innermost_first(gm)]

    def restore(self) -> None:
        for each in self.saved:
            each.restore()


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module; the dictionaries that it keeps parameters, buffers and submodules in as copies."""
    return {name: copy.copy(held) if isinstance(held, (dict, set)) else held for name, held in attributes.items()}


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """An independent graph with the same names and metadata."""
    copied = torch.fx.Graph()
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    output = copied.graph_copy(graph, twins, return_output_node=True)
    assert isinstance(output, tuple)
    for node, twin in twins.items():
        # what others have hung on a node: Dynamo notes on each input where it comes from
        vars(twin).update({name: held for name, held in vars(node).items() if name not in vars(twin)})
    value, old = output
    copied.output(value, type_expr=getattr(old, "type", None)).meta.update(old.meta)
    copied.set_codegen(graph._codegen)  # how arguments are passed: in a list, as a tree
    return copied
