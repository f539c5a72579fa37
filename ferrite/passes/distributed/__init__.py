"""Steps for graphs that talk to other processes: their places in the post-grad order.

None of them is built yet. Each has its name and its place, so that the order is settled, users' passes can be put
beside it, and the table of passes says what is to come. The driver skips it with that reason; graphs with collectives
compile and run, only not faster.
"""

from __future__ import annotations

from ferrite.pipeline import GraphPass, reserved

remove_fsdp2_unsharded_param_graph_input_usage: GraphPass = reserved(
    "remove_fsdp2_unsharded_param_graph_input_usage",
    "A parameter gathered into a graph input is read where it was gathered.",
)
micro_pipeline_tp_pass: GraphPass = reserved(
    "micro_pipeline_tp_pass", "Gathering and scattering overlap with the products beside them, piece by piece."
)
fuse_ddp_communication: GraphPass = reserved(
    "fuse_ddp_communication", "Gradients are reduced together, in buckets, and awaited late."
)
check_ranks_agree: GraphPass = reserved(
    "check_ranks_agree", "All processes compile the same collectives in the same order."
)
decompose_collectives: GraphPass = reserved(
    "decompose_collectives", "A collective that can be split into cheaper ones is."
)
merge_reduce_scatters: GraphPass = reserved(
    "merge_reduce_scatters", "The sum of two scattered reductions is one reduction of the sum."
)
bucket_reduce_scatter: GraphPass = reserved(
    "bucket_reduce_scatter", "Scattered reductions of one group travel together."
)
bucket_all_reduce: GraphPass = reserved("bucket_all_reduce", "Reductions of one group travel together.")
bucket_all_gather: GraphPass = reserved("bucket_all_gather", "Gatherings of one group travel together.")
overlap_scheduling: GraphPass = reserved(
    "overlap_scheduling", "Collectives start early and are awaited late, within a limit of memory."
)
low_contention_collectives: GraphPass = reserved(
    "low_contention_collectives", "Collectives that overlap with computing use kernels that leave it the device."
)
