"""Collectives in graphs of one process among several: merged, and moved to where what is computed hides them.

exchanges       what a graph has of them
settings        the option `distributed`, and the network that is asked
compute_times   how long nodes take
timeline        when collectives begin and end beside them, and where that is best
layout          a graph as a timeline has it, and back
overlap         the pass that moves
packing         several in one tensor
bucketing       the passes that merge
ddp, fsdp, reduce_scatters, rows    what data parallel programs look like
micro_pipeline  products and the collectives beside them, part by part
low_contention  collectives that leave the processors alone
agreement       ranks decide alike
rank_check      and are told where they did not
report          what a graph does, for the record
"""

from ferrite.passes.post_grad.distributed.agreement import all_agreed
from ferrite.passes.post_grad.distributed.bucketing import bucket_all_gather, bucket_all_reduce, bucket_reduce_scatter
from ferrite.passes.post_grad.distributed.ddp import fuse_ddp_communication
from ferrite.passes.post_grad.distributed.fsdp import remove_fsdp2_unsharded_param_graph_input_usage
from ferrite.passes.post_grad.distributed.low_contention import low_contention_collectives
from ferrite.passes.post_grad.distributed.micro_pipeline import micro_pipeline_tp_pass
from ferrite.passes.post_grad.distributed.overlap import overlap_scheduling
from ferrite.passes.post_grad.distributed.rank_check import check_ranks
from ferrite.passes.post_grad.distributed.reduce_scatters import dedup_reduce_scatter
from ferrite.passes.post_grad.distributed.report import (
    CapturedCommunication,
    CollectiveRecord,
    CommunicationRecord,
    captured_communication,
    communication_of,
)
from ferrite.passes.post_grad.distributed.rows import decompose_collectives
from ferrite.passes.post_grad.distributed.settings import SETTINGS, check_distributed, communication_identity

__all__ = [
    "SETTINGS",
    "CapturedCommunication",
    "CollectiveRecord",
    "CommunicationRecord",
    "all_agreed",
    "bucket_all_gather",
    "bucket_all_reduce",
    "bucket_reduce_scatter",
    "captured_communication",
    "check_distributed",
    "check_ranks",
    "communication_identity",
    "communication_of",
    "decompose_collectives",
    "dedup_reduce_scatter",
    "fuse_ddp_communication",
    "low_contention_collectives",
    "micro_pipeline_tp_pass",
    "overlap_scheduling",
    "remove_fsdp2_unsharded_param_graph_input_usage",
]
