"""Which nodes there are and in which order: dead code, locality."""

from __future__ import annotations

import torch

from ferrite.graph import order
from ferrite.passes.shared.noops import erase_dead_calls
from ferrite.pipeline import PassContext, graph_pass


@graph_pass(stage="post_grad")
def eliminate_dead_code(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that nobody reads and that have no effect are erased.

    Writes, random draws, assertions, collectives and effects stay. Dead nodes would count as users and keep other
    rules from firing, so this comes first.
    """
    return erase_dead_calls(gm.graph)


@graph_pass(stage="post_grad", scope="inference")
def reorder_for_locality(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A producer moves to right before its first user, so that its result is still at hand."""
    return order.reorder_for_locality(gm.graph)
