"""Graphs that run in eager as they were captured, before any stage touches them: why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, model_line
from ferrite.lower.errors_of_eager import refused_by_eager
from ferrite.lower.sizes import Sizes, UnknownSize

aten = torch.ops.aten
LEFT = "left_to_eager"  # in the meta of the output of a half of a joint graph: why it runs as it is
SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})


def left_to_eager(gm: torch.fx.GraphModule) -> Refusal | None:
    """Why a graph is not compiled at all, if so: eager raises an error in it, or data decide what no shape can say."""
    why: Refusal | None = gm.graph.output_node().meta.get(LEFT)
    return why or refused_by_eager(gm) or dimensions_from_data(gm)


def leave_halves(joint: torch.fx.GraphModule, halves: Iterable[torch.fx.GraphModule]) -> None:
    """What forward saves for backward has the dimensions that data decide: neither of the two is compiled then."""
    why = dimensions_from_data(joint)
    if why is not None:
        for half in halves:
            half.graph.output_node().meta[LEFT] = why


def dimensions_from_data(gm: torch.fx.GraphModule) -> Refusal | None:
    """Torch takes a size that data decides to be no 1, and keeps its dimension: `x.unique().squeeze(0)`. With one
    element eager has no such dimension, nor has all that is made of it."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    squeezes = [node for graph in graphs for node in graph.nodes if node.target in SQUEEZES]
    sizes = Sizes()
    for node in squeezes:
        if any(may_be_one(size, sizes) for size in squeezed_sizes(node)):
            return Refusal("data decide how many dimensions there are", model_line(node))
    return None


def squeezed_sizes(node: torch.fx.Node) -> list[Any]:
    """The sizes of the dimensions that go where they are 1."""
    value: Any = fake_value(node.all_input_nodes[0])
    dims: Any = node.args[1] if len(node.args) > 1 else range(value.ndim)
    return [value.shape[dim] for dim in ((dims,) if isinstance(dims, int) else dims)] if value.ndim else []


def may_be_one(size: Any, sizes: Sizes) -> bool:
    """Whether data make a size, and may make it 1. Of others guards know it."""
    if isinstance(size, int) or torch_api.has_hint(size):
        return False
    try:
        index = sizes.index(size)
    except UnknownSize:
        return True
    return (index.low is None or index.low <= 1) and (index.high is None or index.high >= 1)
