"""What the passes before left behind: calls that now compute nothing, and calls that nobody reads."""

from __future__ import annotations

import torch

from ferrite.passes.pre_grad.noops import NOOPS
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.noops import erase_dead_calls
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules


@pre_grad_pass(rules=NOOPS)
def remove_noop_again_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that compute nothing, once more, on what the passes before made."""
    return apply_rules(gm, NOOPS, context)


@pre_grad_pass
def remove_dead_calls(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that nobody reads and that have no effect are erased; writes, random draws and switches of modes stay."""
    return erase_dead_calls(gm.graph)
