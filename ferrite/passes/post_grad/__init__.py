"""The post-grad stage: functional ATen graphs, one per direction, on the way to lowering.

`POST_GRAD` is the order. `post_grad_passes(gm, is_inference=...)` runs it on any graph; every step is callable alone.
"""

from __future__ import annotations

import torch

from ferrite.options import Options
from ferrite.passes.post_grad.cleanup import (
    eliminate_dead_code,
    move_constructors_to_gpu,
    remove_assert_ops,
    remove_noop_ops,
    remove_profiler_ops,
    reorder_for_locality,
)
from ferrite.passes.post_grad.cpu_fusions import mkldnn_fusion
from ferrite.passes.post_grad.distributed import (
    bucket_all_gather,
    bucket_all_reduce,
    bucket_reduce_scatter,
    decompose_collectives,
    dedup_reduce_scatter,
    fuse_ddp_communication,
    low_contention_collectives,
    micro_pipeline_tp_pass,
    overlap_scheduling,
    remove_fsdp2_unsharded_param_graph_input_usage,
)
from ferrite.passes.post_grad.gpu_convolutions import convolutions_on_gpu
from ferrite.passes.post_grad.grouped_linear import concat_linear_woq_int4, grouped_gemm_pass
from ferrite.passes.post_grad.higher_order import (
    decompose_auto_functionalized,
    decompose_triton_kernel_wrapper_functional,
)
from ferrite.passes.post_grad.loops import decompose_map_to_while_loop, decompose_scan_to_while_loop
from ferrite.passes.post_grad.opt_in_rules import (
    b2b_gemm_pass,
    check_fusions,
    group_batch_fusion_passes,
    kernel_patterns,
    partitioned_scatter,
    post_grad_fusions,
)
from ferrite.passes.post_grad.own_attention import own_attention
from ferrite.passes.post_grad.own_convolutions import own_convolutions
from ferrite.passes.post_grad.own_products import own_products
from ferrite.passes.post_grad.patterns import pass_patterns
from ferrite.passes.post_grad.product_layouts import lay_out_products
from ferrite.passes.post_grad.quantized_layers import quantized_fusion
from ferrite.passes.post_grad.random_order import chain_random_ops, note_random_order
from ferrite.passes.post_grad.reinplace import reinplace_inplaceable_ops
from ferrite.passes.post_grad.views import view_to_reshape
from ferrite.passes.shared.hooks import hook_pass
from ferrite.passes.shared.run_stage import run_aten_stage
from ferrite.pipeline import Pipeline

__all__ = [
    "POST_GRAD",
    "b2b_gemm_pass",
    "bucket_all_gather",
    "bucket_all_reduce",
    "bucket_reduce_scatter",
    "chain_random_ops",
    "check_fusions",
    "concat_linear_woq_int4",
    "decompose_auto_functionalized",
    "decompose_collectives",
    "decompose_map_to_while_loop",
    "decompose_scan_to_while_loop",
    "decompose_triton_kernel_wrapper_functional",
    "dedup_reduce_scatter",
    "eliminate_dead_code",
    "fuse_ddp_communication",
    "group_batch_fusion_passes",
    "grouped_gemm_pass",
    "kernel_patterns",
    "lay_out_products",
    "low_contention_collectives",
    "micro_pipeline_tp_pass",
    "mkldnn_fusion",
    "move_constructors_to_gpu",
    "note_random_order",
    "overlap_scheduling",
    "own_attention",
    "own_convolutions",
    "own_products",
    "partitioned_scatter",
    "pass_patterns",
    "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_fusions",
    "post_grad_passes",
    "quantized_fusion",
    "reinplace_inplaceable_ops",
    "remove_assert_ops",
    "remove_fsdp2_unsharded_param_graph_input_usage",
    "remove_noop_ops",
    "remove_profiler_ops",
    "reorder_for_locality",
    "view_to_reshape",
]

post_grad_custom_pre_pass = hook_pass("post_grad", "post_grad_custom_pre_pass")
post_grad_custom_post_pass = hook_pass("post_grad", "post_grad_custom_post_pass")

POST_GRAD = Pipeline(
    "post_grad",
    (
        note_random_order,
        view_to_reshape,
        remove_fsdp2_unsharded_param_graph_input_usage,
        eliminate_dead_code,
        reorder_for_locality,
        post_grad_custom_pre_pass,
        grouped_gemm_pass,
        concat_linear_woq_int4,
        remove_profiler_ops,
        group_batch_fusion_passes,
        convolutions_on_gpu,
        remove_noop_ops,
        remove_assert_ops,
        kernel_patterns,
        mkldnn_fusion,
        quantized_fusion,
        own_convolutions,
        pass_patterns,
        partitioned_scatter,
        post_grad_fusions,
        b2b_gemm_pass,
        own_products,
        own_attention,
        lay_out_products,
        micro_pipeline_tp_pass,
        fuse_ddp_communication,
        post_grad_custom_post_pass,
        chain_random_ops,
        move_constructors_to_gpu,
        decompose_collectives,
        dedup_reduce_scatter,
        bucket_reduce_scatter,
        bucket_all_reduce,
        bucket_all_gather,
        overlap_scheduling,
        low_contention_collectives,
        # from here on graphs are no longer functional: nothing that moves nodes may follow
        reinplace_inplaceable_ops,
        decompose_triton_kernel_wrapper_functional,
        decompose_auto_functionalized,
        decompose_scan_to_while_loop,
        decompose_map_to_while_loop,
    ),
)


def post_grad_passes(
    gm: torch.fx.GraphModule, is_inference: bool = False, options: Options | None = None
) -> torch.fx.GraphModule:
    """Run the whole stage on a graph, in place. One of torch calls is brought to ATen first."""
    return run_aten_stage(POST_GRAD, gm, is_inference, options, "post_grad_passes")
