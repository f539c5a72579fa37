"""The joint stage: forward and backward in one functional ATen graph, before it is partitioned; and inference graphs.

`JOINT` is the order. `joint_graph_passes(gm)` runs it on any functional ATen graph, in place; every pass is callable
alone.
"""

from __future__ import annotations

import torch

from ferrite.options import Options
from ferrite.passes.joint.attention import fuse_attention
from ferrite.passes.joint.cleanup import merge_equal_calls, remove_noop_ops
from ferrite.passes.joint.constant_folding import constant_fold_uniform_value
from ferrite.passes.joint.image_layouts import channels_last_in_training
from ferrite.passes.joint.pad_mm import pad_mm
from ferrite.passes.joint.products import fix_iota_device, joint_patterns
from ferrite.passes.joint.quantized_regions import canonicalize_quant_mapping
from ferrite.passes.joint.random_ops import replace_random
from ferrite.passes.joint.softmax import scaled_softmax
from ferrite.passes.joint.views import pointless_views
from ferrite.passes.joint.written_inputs import save_reads_of_written_inputs
from ferrite.passes.shared.hooks import hook_pass
from ferrite.passes.shared.run_stage import run_aten_stage
from ferrite.pipeline import Pipeline

__all__ = [
    "JOINT",
    "canonicalize_quant_mapping",
    "channels_last_in_training",
    "constant_fold_uniform_value",
    "fix_iota_device",
    "fuse_attention",
    "joint_custom_post_pass",
    "joint_custom_pre_pass",
    "joint_graph_passes",
    "joint_patterns",
    "merge_equal_calls",
    "pad_mm",
    "pointless_views",
    "remove_noop_ops",
    "replace_random",
    "save_reads_of_written_inputs",
    "scaled_softmax",
]

joint_custom_pre_pass = hook_pass("joint", "joint_custom_pre_pass")
joint_custom_post_pass = hook_pass("joint", "joint_custom_post_pass")

JOINT = Pipeline(
    "joint",
    (
        canonicalize_quant_mapping,
        joint_custom_pre_pass,
        remove_noop_ops,
        constant_fold_uniform_value,
        pointless_views,
        fuse_attention,
        pad_mm,
        fix_iota_device,
        joint_patterns,
        channels_last_in_training,
        scaled_softmax,
        replace_random,
        merge_equal_calls,
        joint_custom_post_pass,
        save_reads_of_written_inputs,
    ),
)


def joint_graph_passes(
    gm: torch.fx.GraphModule, is_inference: bool = False, options: Options | None = None
) -> torch.fx.GraphModule:
    """Run the whole stage on a graph, in place. One of torch calls is brought to ATen first."""
    return run_aten_stage(JOINT, gm, is_inference, options, "joint_graph_passes")
