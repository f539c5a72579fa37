"""Steps that take away what generates nothing, and that put constants where they are used."""

from __future__ import annotations

import torch

from ferrite.passes.post_grad import asserts, profiler
from ferrite.passes.shared import constructors
from ferrite.passes.shared.noops import NOOP_RULES
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import apply_rules


@graph_pass(stage="post_grad", rules=NOOP_RULES)
def remove_noop_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that compute what they are given are replaced by it."""
    return apply_rules(gm, NOOP_RULES, context)


@graph_pass(stage="post_grad")
def remove_profiler_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Profiler ranges are erased, so that they keep nothing from fusing."""
    return profiler.remove_profiler_ops(gm.graph)


@graph_pass(stage="post_grad")
def remove_assert_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Assertions on metadata, which is known, are erased; those on data stay."""
    return asserts.remove_assert_ops(gm.graph)


@graph_pass(stage="post_grad")
def move_constructors_to_gpu(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Constants made on the CPU for an accelerator are made there."""
    return constructors.move_constructors_to_gpu(gm.graph)
