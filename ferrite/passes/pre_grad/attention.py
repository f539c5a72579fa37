"""Attention, before autograd has seen it: the new call brings its own backward with it."""

from __future__ import annotations

import torch

from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.attention import BEFORE_AUTOGRAD
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules


@pre_grad_pass(rules=BEFORE_AUTOGRAD)
def fuse_attention(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Attention that is written out becomes scaled_dot_product_attention."""
    return apply_rules(gm, BEFORE_AUTOGRAD, context)
