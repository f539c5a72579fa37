"""Training steps of two ranks over a network: what they wait for, how often they exchange, and what memory they take.

    python -m bench.distributed --kind fsdp          parameters gathered in the forward graph, gradients scattered
    python -m bench.distributed --kind ddp           gradients averaged, parameter by parameter

A transformer of 24 small layers. Two processes with a thread each exchange data by gloo, to which the latency and the
bandwidth of a network are added by sleeping (`bench.slow_network`), the same for everybody. Programs take turns:
ferrite with collectives as they are and with what `distributed="auto"` does, told what `comm-bench` measures of that
network; Inductor as it is, and with its own passes. `exposed` is what a rank spends in waits in one step, but for what
it waits for the other to begin, which stands beside it.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import ferrite
from bench.measure import write
from bench.memory import peak_bytes
from bench.report import in_markdown, show
from bench.slow_network import BACKEND, WIRE, Sent, exposed, register
from ferrite.cli.comm_bench import links, seconds_of_calls
from ferrite.machines import Link, Network, machine_of

RANKS = 2
collectives = torch.ops._c10d_functional
COLUMNS = ("program", "step ms", "exposed ms", "for the other ms", "on wire ms", "collectives", "peak MB", "compile s")
INDUCTOR: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
    "aten_distributed_optimizations.collective_estimator": "analytical",
}


class Gathered(torch.autograd.Function):
    """All of a parameter of which each rank has a part; its gradients are summed, and shared out again."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_gather_into_tensor(shard, RANKS, "0"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        scattered = collectives.reduce_scatter_tensor(gradient.contiguous(), "sum", RANKS, "0")
        return collectives.wait_tensor(scattered)


class Averaged(torch.autograd.Function):
    """A parameter as it is; its gradient is the mean over all ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(gradient / RANKS, "sum", "0"))


# Functions, as Dynamo of torch 2.11 ends a graph where `apply` itself is an attribute of a module.
def gathered(parameter: torch.Tensor) -> torch.Tensor:
    return Gathered.apply(parameter)


def averaged(parameter: torch.Tensor) -> torch.Tensor:
    return Averaged.apply(parameter)


class Layer(nn.Module):
    def __init__(self, width: int, whole: Any, parts: int) -> None:
        super().__init__()
        shapes = {"query": (width, width), "key": (width, width), "value": (width, width), "out": (width, width)}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
        self.whole, self.heads = whole, max(width // 32, 1)
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(rows // parts, columns) * columns**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(y, self.whole(weight))

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = nn.functional.layer_norm(x, x.shape[-1:])
        projected = [heads(linear(y, weight)) for weight in (self.query, self.key, self.value)]
        found = nn.functional.scaled_dot_product_attention(*projected, is_causal=True)
        x = x + linear(found.transpose(1, 2).flatten(2), self.out)
        y = nn.functional.layer_norm(x, x.shape[-1:])
        return x + linear(nn.functional.gelu(linear(y, self.up)), self.down)


def model_of(kind: str, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    function, parts = (gathered, RANKS) if kind == "fsdp" else (averaged, 1)
    return nn.Sequential(*(Layer(width, function, parts) for _ in range(layers)))


def tell_inductor() -> None:
    """What its passes ask of a GPU, they are told of a core: operations and bytes a second."""
    import torch._inductor.utils as utils
    import torch.utils._runtime_estimation as estimation  # imported before, maybe, and with names of its own

    machine = machine_of(torch.device("cpu"))
    for each in (utils, estimation):
        each.get_device_tflops = lambda _dtype: machine.flops_per_second(4) / 1e12  # type: ignore[assignment]
        each.get_gpu_dram_gbps = lambda: machine.copy_bytes_per_second / 1e9  # type: ignore[assignment]


def programs(model: nn.Module, network: Path, has_inductor: bool) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def own(**options: Any) -> Any:
        return torch.compile(
            model,
            backend="ferrite",
            fullgraph=True,  # collectives in graphs of their own have nothing beside them
            dynamic=False,
            options={"network": network, "strict": True, **options},
        )

    found = {"ferrite, as captured": own(distributed="off"), "ferrite, scheduled": own()}
    if has_inductor:
        found["Inductor"] = torch.compile(model, fullgraph=True, dynamic=False)
        known = set(torch._inductor.list_options())  # which are not the same in every release
        options = {name: value for name, value in INDUCTOR.items() if name in known}
        found["Inductor, its own passes"] = torch.compile(model, fullgraph=True, dynamic=False, options=options)
    return found


def work(rank: int, chosen: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    tell_inductor()
    register()
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, rank=rank, world_size=RANKS, store=store)
    link = {"any": Link(chosen.latency / 1e6, chosen.bandwidth * 1e9)}
    WIRE.network = Network(link, link, RANKS, "for measurements")
    record = Path(folder) / f"network of {rank}.txt"
    network = measured_network(WIRE.network)
    record.write_text(str(network))
    if rank == 0:
        print(network)
    model = model_of(chosen.kind, chosen.layers, chosen.width)
    x = torch.randn(chosen.batch, chosen.tokens, chosen.width)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, program in programs(model, record, not chosen.no_inductor).items():

        def step(program: Any = program) -> None:
            program(x).square().mean().backward()

        start = time.perf_counter()
        model.zero_grad()
        step()
        rows[name] = {"compile": time.perf_counter() - start}
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        for mine, theirs in zip(gradients[name], next(iter(gradients.values())), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        steps[name] = step
        rows[name]["peak"] = peak_bytes(step)
        if rank == 0:
            print(f"{name}: {rows[name]}", flush=True)
            if name.startswith("ferrite"):
                for kind, record in ferrite.last_compile().communication.graphs:
                    counts = f"{len(record.collectives)} of {record.captured.collectives} collectives"
                    times = f"{record.exposed * 1e3:.1f} ms exposed of {record.captured.exposed * 1e3:.1f}"
                    print(f"  {kind}: {counts}; forecast: {times}", flush=True)
    gradients.clear()
    notes = Path(folder) / f"steps of {rank}"
    notes.write_bytes(pickle.dumps(taken_turns(model, steps, chosen.rounds)))
    dist.barrier()
    if rank == 0:
        of_ranks = [pickle.loads((Path(folder) / f"steps of {each}").read_bytes()) for each in range(RANKS)]
        report(chosen, network, rows, of_ranks)
    dist.barrier()
    dist.destroy_process_group()


def measured_network(wire: Network) -> Network:
    """What `comm-bench` finds on it: what gloo takes is part of it."""
    kinds, sizes = ("all_gather", "reduce_scatter", "all_reduce"), [1 << power for power in range(10, 23, 2)]
    found = links(dist.group.WORLD, RANKS, torch.device("cpu"), sizes, kinds)
    return Network(found, found, RANKS, wire.where, seconds_of_calls(torch.device("cpu")))


Steps = dict[str, list[tuple[float, list[Sent]]]]  # by the program: seconds of each, and its collectives


def taken_turns(model: nn.Module, steps: Mapping[str, Callable[[], None]], rounds: int) -> Steps:
    seen: Steps = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            model.zero_grad()
            dist.barrier()
            WIRE.sent = []
            start = time.perf_counter()
            step()
            seen[name].append((time.perf_counter() - start, WIRE.sent))
    return seen


def report(
    chosen: argparse.Namespace, network: Network, rows: dict[str, dict[str, Any]], of_ranks: Sequence[Steps]
) -> None:
    table, waited = [], {}
    for name in rows:
        found = []
        for both in zip(*(steps[name] for steps in of_ranks), strict=True):
            sent = [each for _, each in both]
            on_wire = sum(each.seconds for each in sent[0])
            found.append((max(seconds for seconds, _ in both), *exposed(sent), on_wire, len(sent[0])))
        *times, count = (statistics.median(column) for column in zip(*found, strict=True))
        waited[name] = times[1]
        peak, compiling = f"{rows[name]['peak'] / 1e6:.1f}", f"{rows[name]['compile']:.1f}"
        table.append((name, *(f"{value * 1e3:.1f}" for value in times), f"{count:.0f}", peak, compiling))
    own = waited["ferrite, scheduled"]
    others = [name for name in waited if name != "ferrite, scheduled"]
    lines = [f"exposed, of what is exposed of {name}: {own / waited[name]:.2f}" for name in others]
    sizes = f"{chosen.layers} layers of width {chosen.width}, batches of {chosen.batch} x {chosen.tokens}"
    wire = f"{chosen.latency:.0f} us and {chosen.bandwidth:g} GB/s"
    title = f"{chosen.kind}: {sizes}; two ranks, one thread each; a network with {wire}; {chosen.rounds} rounds"
    show(title, COLUMNS, table, lines)
    if chosen.write:
        facts = [title, "", *in_markdown(COLUMNS, table), "", *(f"- {line}" for line in lines)]
        facts += ["", "The network as measured, gloo included:", "", "```", str(network).rstrip(), "```"]
        write(f"distributed-{chosen.kind}", f"Collectives of two ranks, {chosen.kind}", facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--latency", type=float, default=200.0, help="us (200)")
    parser.add_argument("--bandwidth", type=float, default=1.0, help="GB/s (1)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--write", action="store_true", help="bench/results/distributed-KIND-MACHINE.md")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (chosen, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
