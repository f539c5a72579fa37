"""The joint stage: forward and backward in one functional ATen graph, before it is partitioned; and inference graphs.

`JOINT` is the order. `joint_graph_passes(gm)` runs it on any functional ATen graph, in place; every pass is callable
alone.
"""

from __future__ import annotations

import torch

from ferrite.options import Options, resolve
from ferrite.passes.joint.attention import fuse_attention
from ferrite.passes.joint.hooks import joint_custom_post_pass, joint_custom_pre_pass
from ferrite.passes.to_aten import to_aten
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline

__all__ = ["JOINT", "fuse_attention", "joint_custom_post_pass", "joint_custom_pre_pass", "joint_graph_passes"]

JOINT = Pipeline(
    "joint",
    (
        joint_custom_pre_pass,
        fuse_attention,
        joint_custom_post_pass,
    ),
)


def joint_graph_passes(
    gm: torch.fx.GraphModule, is_inference: bool = False, options: Options | None = None
) -> torch.fx.GraphModule:
    """Run the whole stage on a graph, in place. One of torch calls is brought to ATen first."""
    options = options or resolve()
    to_aten(gm)
    run_pipeline(JOINT, gm, PassContext(options, is_inference, Fuel(options.fuel)))
    return gm
