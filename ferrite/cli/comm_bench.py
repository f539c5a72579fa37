"""`torchrun --nproc-per-node 8 -m ferrite comm-bench network.txt`: what communication costs here, as a record."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ferrite.capture import torch_runtime
from ferrite.errors import UserError
from ferrite.machines import GroupShape, Link, Network, fitted

REPEATS = 5
IS_OVER_SECONDS = 0.02  # after which a small collective is over


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "comm-bench",
        help="measure collectives, for the option network",
        description="Measure collectives among the processes that torchrun started, and write a record for the option "
        "`network`: torchrun --nproc-per-node 2 -m ferrite comm-bench network.txt",
    )
    parser.add_argument("file", type=Path, help="where the record goes")
    parser.add_argument("--backend", help="of torch.distributed; nccl where there are GPUs, else gloo")
    parser.add_argument("--largest", type=int, default=24, help="bytes of the largest message, as a power of two (24)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        raise UserError(
            "comm-bench measures between processes, and this one is alone",
            {"to change that": "torchrun --nproc-per-node 2 -m ferrite comm-bench network.txt"},
        )
    if not 12 <= chosen.largest <= 32:
        raise UserError(f"--largest is {chosen.largest}", {"expected": "a whole number from 12 to 32"})
    network = measured(chosen.backend, chosen.largest)
    if int(os.environ["RANK"]) == 0:
        chosen.file.write_text(str(network))
        print(network, end="")
    return 0


def measured(backend: str | None, largest: int) -> Network:
    """The network between the ranks of this job. Every rank gets the same: what the slowest saw."""
    dist = torch.distributed
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = backend or ("nccl" if on_gpu else "gloo")
    dist.init_process_group(backend)
    try:
        world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        if world < 2:
            raise UserError(
                "comm-bench measures between processes, and there is one", {"expected": "two or more ranks"}
            )
        sizes = [1 << power for power in range(10, largest + 1, 2)]
        inside = between = None
        if here > 1:
            machines = [list(range(first, min(first + here, world))) for first in range(0, world, here)]
            groups = [dist.new_group(ranks) for ranks in machines]
            inside = links(groups[dist.get_rank() // here], here, device, sizes)
        if here < world:
            between = links(dist.group.WORLD, world, device, sizes)
        where = f"{backend}, torch {torch.__version__}, {world} ranks"
        call = seconds_of_calls(device)
        return Network(inside or between or {}, between or inside or {}, here, where, call)
    finally:
        dist.destroy_process_group()


def links(
    group: Any, ranks: int, device: torch.device, sizes: Sequence[int], kinds: Collection[str] = ()
) -> dict[str, Link]:
    """A link for each kind, or some, such that `Network.seconds` gives back what was measured."""
    found: dict[str, Link] = {}
    for kind in kinds or COLLECTIVES:
        times = {size: seconds(COLLECTIVES[kind], size, group, ranks, device) for size in sizes}
        found[kind] = per_step(kind, fitted(times), ranks)
    return found


def per_step(kind: str, whole: Link, ranks: int) -> Link:
    """Of seconds of a whole collective by its bytes, what one step and one link have to do with it."""
    unit = Network({kind: Link(1.0, 1e300)}, {}, ranks_per_machine=1 << 30)
    shape = GroupShape(ranks)
    latency = unit.seconds(kind, 0, shape)
    one = Network({kind: Link(0.0, 1.0)}, {}, ranks_per_machine=1 << 30).seconds(kind, 1, shape)
    return Link(whole.latency / latency, whole.bandwidth * one)


def seconds_of_calls(device: torch.device) -> float:
    """What to begin a collective and to wait for one that is over take, as compiled programs call them: the median of
    some times, that of the slowest rank."""
    begin, wait, times = torch_runtime.begin_sum, torch_runtime.end_sum, list[float]()
    small = torch.zeros(1, device=device)
    for repeat in range(REPEATS + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        begun = begin(small)
        taken = time.perf_counter() - start
        time.sleep(IS_OVER_SECONDS)
        start = time.perf_counter()
        wait(begun)
        if repeat:
            times.append(taken + time.perf_counter() - start)
    return of_slowest(statistics.median(times), device)


def of_slowest(seconds: float, device: torch.device) -> float:
    found = torch.tensor(seconds, device=device, dtype=torch.float64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return float(found)


def seconds(collective: Collective, size: int, group: Any, ranks: int, device: torch.device) -> float:
    """The median of some times, each that of the slowest rank."""
    run_once = collective(size, group, ranks, device)
    times = []
    for repeat in range(REPEATS + 1):
        torch.distributed.barrier(group)
        start = time.perf_counter()
        run_once()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat:  # the first one makes connections
            times.append(time.perf_counter() - start)
    return of_slowest(statistics.median(times), device)


Collective = Callable[[int, Any, int, torch.device], Callable[[], Any]]


def newer(name: str, before: str) -> Callable[..., Any]:
    """A collective of `torch.distributed`, by the name it has from torch 2.13 on, or by that of before."""
    found: Callable[..., Any] = getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
    return found


def all_gather(size: int, group: Any, ranks: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.zeros(ranks * max(size // ranks, 1), dtype=torch.uint8, device=device)
    part = whole[: len(whole) // ranks].clone()
    call = newer("all_gather_single", "all_gather_into_tensor")
    return lambda: call(whole, part, group=group)


def reduce_scatter(size: int, group: Any, ranks: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.zeros(ranks * max(size // 4 // ranks, 1), device=device)
    part = whole[: len(whole) // ranks].clone()
    call = newer("reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: call(part, whole, group=group)


def all_reduce(size: int, group: Any, ranks: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.zeros(max(size // 4, 1), device=device)
    return lambda: torch.distributed.all_reduce(whole, group=group)


def all_to_all(size: int, group: Any, ranks: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.zeros(ranks * max(size // ranks, 1), dtype=torch.uint8, device=device)
    other = torch.empty_like(whole)
    return lambda: torch.distributed.all_to_all_single(other, whole, group=group)


def broadcast(size: int, group: Any, ranks: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.zeros(size, dtype=torch.uint8, device=device)
    first = torch.distributed.get_process_group_ranks(group)[0]
    return lambda: torch.distributed.broadcast(whole, first, group=group)


COLLECTIVES: Mapping[str, Collective] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
}
