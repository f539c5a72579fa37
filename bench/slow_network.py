"""A process group for measurements: gloo on one machine, with the latency and the bandwidth of a network added.

Between processes of one machine gloo is done when both have copied, on cores that computing needs too. Here a
collective is on its way for as long as a network with the given numbers would take, one after the other in each group,
and whoever waits for it sleeps. What anybody waited for is noted, in the same way for every compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ferrite.machines import GroupShape, Network

BACKEND = "slow"


@dataclass
class Sent:
    """One collective of this process: when it began, when somebody began to wait for it and when that was over, by a
    clock that all processes of a machine share; and its seconds on the network."""

    begun: float
    seconds: float
    wait_begun: float = 0.0
    wait_over: float = 0.0


@dataclass
class Wire:
    """The network of this process, and what went over it, in the order in which it began."""

    network: Network | None = None
    sent: list[Sent] = field(default_factory=list)


def exposed(of_ranks: Sequence[Sequence[Sent]]) -> tuple[float, float]:
    """Seconds that a rank waited on average in one step: for communication, and for another rank that had not begun a
    collective yet, which no order of collectives is to blame for."""
    communication = others = 0.0
    for of_one in zip(*of_ranks, strict=True):
        all_begun = max(each.begun for each in of_one)
        for each in of_one:
            late = max(min(all_begun, each.wait_over) - each.wait_begun, 0.0)
            communication += each.wait_over - each.wait_begun - late
            others += late
    return communication / len(of_ranks), others / len(of_ranks)


WIRE = Wire()


class Delayed(dist._Work):  # type: ignore[misc, name-defined]
    """A collective that is over when gloo is done, and not before the network would be."""

    def __init__(self, inner: Any, end: float, results: Sequence[Tensor], note: Sent) -> None:
        super().__init__()
        self.inner, self.end, self.results, self.note, self.is_over = inner, end, results, note, False

    def wait(self, *timeout: Any) -> bool:
        if self.is_over:
            return True
        self.note.wait_begun = time.perf_counter()
        self.inner.wait()
        left = self.end - time.perf_counter()
        if left > 0:  # to sleep for no time would give the core away all the same
            time.sleep(left)
        self.note.wait_over = time.perf_counter()
        self.is_over = True
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(list(self.results))
        return future


@dataclass
class All:
    """Several exchanges that are waited for as one."""

    members: list[Any]

    def wait(self) -> None:
        for each in self.members:
            each.wait()


class SlowGroup(dist.ProcessGroup):
    """Collectives of gloo, each with the time that the network of this process would take."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
        self.ranks, self.free = size, 0.0

    def size(self) -> int:
        return self.ranks

    def getBackendName(self) -> str:
        return BACKEND

    def begin(self, kind: str, whole: Sequence[Tensor], results: Sequence[Tensor], start: Callable[[], Any]) -> Any:
        """`whole`: tensors whose bytes the cost of the kind is counted by."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        took = WIRE.network.seconds(kind, size, GroupShape(self.ranks)) if WIRE.network is not None else 0.0
        now = time.perf_counter()
        self.free = max(now, self.free) + took
        WIRE.sent.append(Sent(now, took))
        return Delayed(start(), self.free, results, WIRE.sent[-1])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self.begin("all_reduce", tensors, tensors, lambda: self.inner.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self.begin("all_reduce", tensors, tensors, lambda: self.inner.allreduce_coalesced(tensors, opts))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Any:
        def start() -> All:
            return All([self.inner._allgather_base(*both) for both in zip(outputs, given, strict=True)])

        return self.begin("all_gather", outputs, outputs, start)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Any:
        options = opts or dist.ReduceScatterOptions()

        def start() -> All:
            return All([self.inner._reduce_scatter_base(*both, options) for both in zip(outputs, given, strict=True)])

        return self.begin("reduce_scatter", given, outputs, start)

    # as torch called them before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        return self.begin("broadcast", tensors, tensors, lambda: self.inner.broadcast(tensors, opts))

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        return self.begin("all_gather", outputs[0], outputs[0], lambda: self.inner.allgather(outputs, given))

    def barrier(self, opts: Any = None) -> Any:
        return self.inner.barrier()


LIBRARY = torch.library.Library("_c10d_functional", "IMPL")


def gather_into(given: Tensor, ranks: int, group: str, *, out: Tensor) -> Tensor:
    """What Inductor calls for several gathers in one: in C++ it goes past what a group says in Python."""
    begun = dist.distributed_c10d._resolve_process_group(group).all_gather_single(out, given)
    torch._C._distributed_c10d._register_work(out, begun)
    return out


def register() -> None:
    """Let `init_process_group("slow")` make such a group."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, SlowGroup, devices=["cpu"])
        LIBRARY.impl("all_gather_into_tensor_out", gather_into, "CPU")
