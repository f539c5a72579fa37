"""Attention in inference graphs that arrive as ATen.

Graphs that were captured have had theirs in the pre-grad stage. In a training graph it is too late: the backward part
reads the weights.
"""

from __future__ import annotations

import torch

from ferrite.passes.shared.attention import FOR_INFERENCE
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import apply_rules


@graph_pass(stage="joint", scope="inference", rules=FOR_INFERENCE)
def fuse_attention(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Attention that is written out becomes scaled_dot_product_attention."""
    return apply_rules(gm, FOR_INFERENCE, context)
