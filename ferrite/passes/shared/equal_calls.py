"""Equal calls become one, before the graph is partitioned: what is computed once is saved once.

The partitioner of torch does the same, but imports Inductor to do it, which takes longer than many a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch

from ferrite.graph import (
    Regions,
    attribute_of,
    fingerprint,
    has_effect,
    is_known_operator,
    is_random,
    storages_of,
    stream_of,
)
from ferrite.pipeline import PassContext
from ferrite.rewrite import VisibleMemory

EQUAL_CALLS = "merge_equal_calls"


def one_of_equal_calls(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that are given the same compute the same: one of them is enough."""
    regions, visible = Regions(gm.graph), VisibleMemory(gm.graph)
    first_calls: dict[Hashable, torch.fx.Node] = {}
    count = 0
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not context.fuel.left:
            continue
        asked = str(node.meta.get("recompute"))  # what the user wants a checkpoint to save, and what not
        first = first_calls.setdefault((fingerprint(node), regions.of(node), str(stream_of(node)), asked), node)
        if first is node or not can_be_merged(node):
            continue
        if any(place in visible.readers or place in visible.written for place in storages_of(node)):
            continue
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        context.fuel.spend()
        context.count(EQUAL_CALLS)
        count += 1
    return count


def can_be_merged(node: torch.fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(attribute_of(node), torch.Tensor)
    if node.meta.get("unbacked_bindings"):
        return False
    is_understood = node.target is operator.getitem or is_known_operator(node)
    return is_understood and not has_effect(node) and not is_random(node)
