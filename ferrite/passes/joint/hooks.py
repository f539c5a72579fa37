"""Where users' own callables see the joint graph."""

from __future__ import annotations

import torch

from ferrite.passes.shared.hooks import run_hooks
from ferrite.pipeline import PassContext, graph_pass


@graph_pass(stage="joint")
def joint_custom_pre_pass(gm: torch.fx.GraphModule, context: PassContext) -> int | None:
    """The callables of the option joint_custom_pre_pass."""
    return run_hooks(context.options.joint_custom_pre_pass, gm, context)


@graph_pass(stage="joint")
def joint_custom_post_pass(gm: torch.fx.GraphModule, context: PassContext) -> int | None:
    """The callables of the option joint_custom_post_pass."""
    return run_hooks(context.options.joint_custom_post_pass, gm, context)
