"""A program for every pass over collectives, in which it fires, and one like it in which it does not.

They run on two ranks, compiled as users compile them. `fires` and `not_here` are as in `tests.rule_programs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp  # defines its operators

from tests.distributed.programs import gathered, reduced, scattered

aten = torch.ops.aten
RANKS = 2


@dataclass(frozen=True)
class RankProgram:
    """`has_memory`: the ranks share memory. That is so on GPUs alone; here it is said, and copies are collectives."""

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[[], list[torch.Tensor]]
    distributed: Mapping[str, Any]
    fires: tuple[str, ...] = ()
    not_here: tuple[str, ...] = ()
    has_memory: bool = False


def randn(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(shape) for shape in shapes]


def gather(x: torch.Tensor) -> torch.Tensor:
    return gathered(x, ranks=dist.get_world_size())


def scatter(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return scattered(x, op, ranks=dist.get_world_size())


# --- parameters of FSDP -----------------------------------------------------------------------------------------------


def empty_parameter() -> list[torch.Tensor]:
    """The memory of the whole parameter is given up between uses; this rank's part of it, and what is multiplied."""
    parameter = torch.randn(8, 4)
    parameter.untyped_storage().resize_(0)
    return [parameter, torch.randn(8 // dist.get_world_size(), 4), torch.randn(3, 8)]


def whole_parameter() -> list[torch.Tensor]:
    return [torch.randn(8, 4), torch.randn(8 // dist.get_world_size(), 4), torch.randn(3, 8)]


def used_while_it_is_there(parameter: torch.Tensor, shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.ops.inductor.resize_storage_bytes_(parameter, 8 * 4 * 4)
    torch.ops.fsdp.copy_(parameter, gather(shard))
    y = x @ parameter
    torch.ops.inductor.resize_storage_bytes_(parameter, 0)
    return y.relu()


def filled_elsewhere(parameter: torch.Tensor, shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parameter.copy_(gather(shard))
    return (x @ parameter).relu()


# --- products of tensor parallel layers -------------------------------------------------------------------------------


def tensor_parallel_layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor(torch.relu(rows @ w) @ v, "sum", 0, dist.group.WORLD)


def summed_rows(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor(x, 0, dist.group.WORLD).sum(0) @ w


# --- gradients --------------------------------------------------------------------------------------------------------


def averages(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """As DDP asks for them in its communication hook: divided, then summed."""
    found = []
    for weight in weights:
        x = x @ weight
        found.append(reduced(aten.div.Tensor(x, RANKS)))
    return found


def maxima(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    return [reduced(aten.div.Tensor(x @ weight, RANKS), "max") for weight in weights]


# --- sums of sums, rows -----------------------------------------------------------------------------------------------


def orthogonalised(shard: torch.Tensor) -> torch.Tensor:
    """A step of an iteration that optimizers use, on the whole matrix; each rank keeps its rows."""
    x = gather(shard)
    x = x / torch.linalg.vector_norm(x)
    for _ in range(2):
        x = 1.5 * x - 0.5 * (x @ (x.t() @ x))
    return x.split(shard.shape[0])[dist.get_rank()]


def returned_whole(shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = gather(shard)
    return x.split(shard.shape[0])[dist.get_rank()] * 2, x


def summed_meanwhile(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is on its way while the next product is computed."""
    z = x @ y
    return scatter(z), z @ y


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = (
    f"post_grad/bucket_{name}" for name in ("all_gather", "reduce_scatter", "all_reduce")
)
FSDP = "post_grad/remove_fsdp2_unsharded_param_graph_input_usage"
MICRO = "post_grad/micro_pipeline_tp_pass"
COPIES = "post_grad/low_contention_collectives"
DDP = "post_grad/fuse_ddp_communication"
ROWS = "post_grad/decompose_collectives"
SUMS = "post_grad/dedup_reduce_scatter"
OVERLAP = "post_grad/overlap_scheduling"
AT_ONCE: dict[str, Any] = {"min_mb": 0, "ignore_overlap": True}

PROGRAMS: tuple[RankProgram, ...] = (
    RankProgram("parameter", used_while_it_is_there, empty_parameter, {}, (FSDP,)),
    RankProgram("layer", tensor_parallel_layer, randn((8, 6), (6, 10), (10, 6)), {"async_tp": {}}, (MICRO,)),
    RankProgram(
        "copies",
        lambda x, y: (gather(x) * 2, scatter(y).sin()),
        randn((4, 6), (4, 6)),
        {"low_contention": AT_ONCE},
        (COPIES,),
        has_memory=True,
    ),
    RankProgram("averages", averages, randn(*[(8, 8)] * 4), {"ddp_fuse": {}}, (DDP,)),
    RankProgram("rows", orthogonalised, randn((6, 5)), {"decompose_comms": {}}, (ROWS,)),
    RankProgram(
        "sums of sums",
        lambda a, b: scatter(a) + scatter(b),
        randn((4, 3), (4, 3)),
        {"dedup_reduce_scatter": {}},
        (SUMS,),
    ),
    RankProgram(
        "scatters",
        lambda a, b: (scatter(a).sin(), scatter(b * 2)),
        randn((4, 3), (6, 5)),
        {"bucket_rs": {}},
        (REDUCE_SCATTER,),
    ),
    RankProgram(
        "reductions",
        lambda a, b: (reduced(a).sin(), reduced(b * 2)),
        randn((4, 3), (6, 5)),
        {"bucket_ar": {}},
        (ALL_REDUCE,),
    ),
    RankProgram(
        "gathers",
        lambda a, b: (gather(a).sin(), gather(b * 2)),
        randn((4, 3), (6, 5)),
        {"bucket_ag": {}},
        (ALL_GATHER,),
    ),
    RankProgram("a product meanwhile", summed_meanwhile, randn((64, 64), (64, 64)), {"overlap": {}}, (OVERLAP,)),
)
NEAR_MISSES: tuple[RankProgram, ...] = (
    RankProgram("written by the user", filled_elsewhere, whole_parameter, {}, (), (FSDP,)),
    RankProgram("rows are summed first", summed_rows, randn((8, 6), (6, 10), (10, 6)), {"async_tp": {}}, (), (MICRO,)),
    RankProgram(
        "no memory is shared", lambda x: gather(x) * 2, randn((4, 6)), {"low_contention": AT_ONCE}, (), (COPIES,)
    ),
    RankProgram("maxima", maxima, randn(*[(8, 8)] * 3), {"ddp_fuse": {}}, (), (DDP,)),
    RankProgram("all rows are returned", returned_whole, randn((6, 5)), {"decompose_comms": {}}, (), (ROWS,)),
    RankProgram(
        "greatest of sums",
        lambda a, b: scatter(a) + scatter(b.double()),
        randn((4, 3), (4, 3)),
        {"dedup_reduce_scatter": {}},
        (),
        (SUMS,),
    ),
    RankProgram(
        "one needs the other",
        lambda a: (scatter(scatter(a)), reduced(reduced(a).sin()), gather(gather(a))),
        randn((4, 3)),
        {"bucket_rs": {}, "bucket_ar": {}, "bucket_ag": {}},
        (),
        (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER),
    ),
    RankProgram("nothing to compute meanwhile", lambda p: gather(p), randn((4, 8)), {"overlap": {}}, (), (OVERLAP,)),
)
