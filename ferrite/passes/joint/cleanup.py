"""No-ops and equal calls go before the graph is partitioned: what is not computed is not saved for the backward."""

from __future__ import annotations

import torch

from ferrite.passes.shared.equal_calls import EQUAL_CALLS, one_of_equal_calls
from ferrite.passes.shared.noops import NOOP_RULES
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import apply_rules


@graph_pass(stage="joint", rules=NOOP_RULES)
def remove_noop_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that compute what they are given are replaced by it."""
    return apply_rules(gm, NOOP_RULES, context)


merge_equal_calls = graph_pass(one_of_equal_calls, stage="joint", name=EQUAL_CALLS)
