"""Calls that compute what they are given, before the graph is partitioned: what is not calculated is not saved."""

from __future__ import annotations

import torch

from ferrite.passes.post_grad.noops import NOOP_RULES
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import apply_rules


@graph_pass(stage="joint", rules=NOOP_RULES)
def remove_noop_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that compute what they are given are replaced by it."""
    return apply_rules(gm, NOOP_RULES, context)
