"""The pre-grad stage: the graph of torch calls as Dynamo captured it, before autograd has seen it.

`PRE_GRAD` is the order. Inside the stage every call is the ATen overload it stands for; before users' own passes and at
the end it is spelled as a torch function again. `pre_grad_passes(gm, example_inputs)` runs the stage on any graph of
torch calls, in place; every pass is callable alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.options import Options
from ferrite.passes.pre_grad.attention import fuse_attention
from ferrite.passes.pre_grad.attention_masks import drop_attention_masks
from ferrite.passes.pre_grad.batch_fusion import group_batch_fusion_passes
from ferrite.passes.pre_grad.canonical import normalization_pass, normalize_node_kwargs_pass, numpy_compat_normalization
from ferrite.passes.pre_grad.cleanup import remove_dead_calls, remove_noop_again_pass
from ferrite.passes.pre_grad.compress import (
    use_matmul_fuse_lce_replace_first_LCE,
    use_matmul_lce_replace_normal_LCE,
    use_triton_dot_compress,
    use_triton_lce_replace_normal_LCE,
    use_triton_lce_replace_simple_LCE,
)
from ferrite.passes.pre_grad.conv_bn import efficient_conv_bn_eval, fuse_conv_bn
from ferrite.passes.pre_grad.einsum import einsum_to_pointwise_pass
from ferrite.passes.pre_grad.hooks import pre_grad_custom_pass
from ferrite.passes.pre_grad.lift_quantize import quant_lift_up
from ferrite.passes.pre_grad.linears import fuse_parallel_linear_pass, fuse_split_linear_add_pass
from ferrite.passes.pre_grad.metadata import add_values, values_to_examples
from ferrite.passes.pre_grad.noops import remove_identity, remove_noop_pass
from ferrite.passes.pre_grad.numeric_check import numerics_checked
from ferrite.passes.pre_grad.numeric_runs import Tolerance, unlike_values
from ferrite.passes.pre_grad.pointwise import relu_nan_to_num, sink_cat_after_pointwise
from ferrite.passes.pre_grad.reshapes import remove_reshape_pass
from ferrite.passes.pre_grad.sampling import apply_gumbel_max_trick
from ferrite.passes.pre_grad.split_cat import PARTS, cancel_split_cat_pass, part_alone, split_cat_again_pass
from ferrite.passes.pre_grad.splits import remove_split_ops_pass
from ferrite.passes.pre_grad.stage import reason_to_leave, run_stage, torch_spelling
from ferrite.passes.pre_grad.transposes import linear_permute_fusion, permute_linear_fusion, permute_matmul_fusion
from ferrite.passes.shared.run_stage import checked
from ferrite.pipeline import Fuel, GraphPass, PassContext, Pipeline

__all__ = [
    "PRE_GRAD",
    "Tolerance",
    "add_values",
    "apply_gumbel_max_trick",
    "cancel_split_cat_pass",
    "drop_attention_masks",
    "efficient_conv_bn_eval",
    "einsum_to_pointwise_pass",
    "fuse_attention",
    "fuse_conv_bn",
    "fuse_parallel_linear_pass",
    "fuse_split_linear_add_pass",
    "group_batch_fusion_passes",
    "linear_permute_fusion",
    "normalization_pass",
    "normalize_node_kwargs_pass",
    "numerics_checked",
    "numpy_compat_normalization",
    "permute_linear_fusion",
    "permute_matmul_fusion",
    "pre_grad_custom_pass",
    "pre_grad_passes",
    "quant_lift_up",
    "reason_to_leave",
    "relu_nan_to_num",
    "remove_identity",
    "remove_noop_again_pass",
    "remove_noop_pass",
    "remove_reshape_pass",
    "remove_split_ops_pass",
    "sink_cat_after_pointwise",
    "split_cat_again_pass",
    "torch_spelling",
    "unlike_values",
    "use_matmul_fuse_lce_replace_first_LCE",
    "use_matmul_lce_replace_normal_LCE",
    "use_triton_dot_compress",
    "use_triton_lce_replace_normal_LCE",
    "use_triton_lce_replace_simple_LCE",
    "values_to_examples",
]

PRE_GRAD = Pipeline(
    "pre_grad",
    (
        # one spelling, so that every later rule is written once
        numpy_compat_normalization,
        normalize_node_kwargs_pass,
        normalization_pass,
        # what computes nothing
        remove_identity,
        remove_noop_pass,
        remove_reshape_pass,
        remove_split_ops_pass,
        # elementwise calls in better places
        relu_nan_to_num,
        sink_cat_after_pointwise,
        # before its products are joined with others, or take in transposes
        fuse_attention,
        drop_attention_masks,
        linear_permute_fusion,
        permute_linear_fusion,
        permute_matmul_fusion,
        # splits against concats
        cancel_split_cat_pass,
        einsum_to_pointwise_pass,
        # independent calls become one
        fuse_split_linear_add_pass,
        fuse_parallel_linear_pass,
        group_batch_fusion_passes,
        split_cat_again_pass,
        # compression of embeddings, if asked for: the first sees single calls, the others what it makes
        use_matmul_fuse_lce_replace_first_LCE,
        use_triton_lce_replace_normal_LCE,
        use_matmul_lce_replace_normal_LCE,
        use_triton_lce_replace_simple_LCE,
        use_triton_dot_compress,
        # behind all moves, which would hide a layer from its norm
        fuse_conv_bn,
        efficient_conv_bn_eval,
        apply_gumbel_max_trick,
        pre_grad_custom_pass,
        # last, on the chains of views as they stay
        quant_lift_up,
        # what the passes before left behind
        remove_noop_again_pass,
        remove_dead_calls,
        torch_spelling,
    ),
    closing="torch_spelling",
)


def __getattr__(name: str) -> GraphPass:
    """Parts of `cancel_split_cat_pass` by their names, and what has a second name on graphs of ATen operators:
    `pre_grad.split_cat_pass`, `pre_grad.split_cat_pass_aten`."""
    plain = name.removesuffix("_aten")
    if plain in PARTS:
        return part_alone(plain)
    if name == "normalization_pass_aten":
        return normalization_pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pre_grad_passes(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any] = (), options: Options | None = None
) -> torch.fx.GraphModule:
    """Run the whole stage on a graph of torch calls, in place.

    The example inputs are looked at, never run on; graphs whose nodes carry values need none.
    """
    options = checked(options)
    if reason_to_leave(gm) is None:
        context = PassContext(options, not torch.is_grad_enabled(), Fuel(options.fuel))
        run_stage(PRE_GRAD, gm, example_inputs, context)
    return gm
