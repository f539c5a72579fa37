"""A graph of forward and backward as text: of two graphs with one text, passes make the same.

It is the text of a functional graph, with what only passes and the partitioner read: names of nodes, since passes make
new ones of them, and what is said to the partitioner.
"""

from __future__ import annotations

import torch

from ferrite.cache.graph_text import GraphText
from ferrite.errors import NotCached


def joint_text(gm: torch.fx.GraphModule) -> dict[str, str]:
    """The components of a key that are about the graph."""
    text = GraphText()
    text.add(gm)
    if text.bodies > 1:
        raise NotCached("it holds another graph, in which passes run, too")
    nodes = list(gm.graph.nodes)
    return {
        **text.components(),
        "names": " ".join([node.name for node in nodes]),
        "tags": " ".join([f"{node.meta.get('partitioner_tag')} {node.meta.get('recompute')}" for node in nodes]),
        **{f"input {place}": looks for place, looks in enumerate(text.inputs)},
    }
