"""Which nodes there are and in which order: dead code, locality."""

from __future__ import annotations

import torch

from ferrite.graph import has_effect, order
from ferrite.pipeline import PassContext, graph_pass


@graph_pass(stage="post_grad")
def eliminate_dead_code(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that nobody reads and that have no effect are erased.

    Writes, random draws, assertions, collectives and effects stay. Dead nodes would count as users and keep other
    rules from firing, so this comes first.
    """
    erased = 0
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and not has_effect(node):
            gm.graph.erase_node(node)
            erased += 1
    return erased


@graph_pass(stage="post_grad", scope="inference")
def reorder_for_locality(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A producer moves to right before its first user, so that its result is still at hand."""
    return order.reorder_for_locality(gm.graph)
