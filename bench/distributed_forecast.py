"""What collectives would cost on many GPUs, on paper: forecasts of the cost model, made in one process.

    python -m bench.distributed_forecast --step         a training step of seven billion parameters on 64 ranks
    python -m bench.distributed_forecast --passes       how long the passes take, by the number of collectives
    python -m bench.distributed_forecast --compile      how long `torch.compile` takes, by the number of collectives

The step has the sizes of a transformer with 32 layers of width 4096. Parameters are spread over 8 ranks of a machine
(tensor and sequence parallel), and each part over 8 machines (FSDP, gathered again for the gradients). One graph of
forward and backward is traced with fake values in a process group of imagined ranks; passes run on it as they do when
it is compiled. Nothing is computed, and nothing sent.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import register_flop_formula

import ferrite
from bench.measure import write
from bench.report import in_markdown, show
from ferrite.machines import Link, by_device, gpu_machine, network_of
from ferrite.options import Options, resolve
from ferrite.passes import captured_communication, communication_of
from ferrite.passes.post_grad import POST_GRAD
from ferrite.pipeline import PassContext, Pipeline, run_pipeline

collectives = torch.ops._c10d_functional
aten = torch.ops.aten
STEPS = (
    "view_to_reshape",
    "micro_pipeline_tp_pass",
    "fuse_ddp_communication",
    "dedup_reduce_scatter",
    "bucket_reduce_scatter",
    "bucket_all_reduce",
    "bucket_all_gather",
    "overlap_scheduling",
)


def gathered(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, ranks, group))


def scattered(x: torch.Tensor, group: str, ranks: int, op: str = "sum") -> torch.Tensor:
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), op, ranks, group))


# --- attention, as one call: on fake values torch would take it apart -------------------------------------------------

LIBRARY = torch.library.Library("bench", "FRAGMENT")
LIBRARY.define("attention(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.define("attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")
LIBRARY.impl("attention", lambda q, k, v: torch.empty_like(q), "Meta")
LIBRARY.impl("attention_backward", lambda gradient, q, k, v: tuple(map(torch.empty_like, (q, k, v))), "Meta")


def operations(query: Sequence[int], products: int) -> int:
    """Of causal attention, which leaves out half."""
    heads, rows, size = query
    return products * heads * rows * rows * size


@register_flop_formula(torch.ops.bench.attention)  # type: ignore[misc]
def attention_operations(query: Any, *_: Any, **__: Any) -> int:
    return operations(query, 2)


@register_flop_formula(torch.ops.bench.attention_backward)  # type: ignore[misc]
def attention_backward_operations(_gradient: Any, query: Any, *_: Any, **__: Any) -> int:
    return operations(query, 5)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        return torch.ops.bench.attention(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.bench.attention_backward(gradient, *ctx.saved_tensors)


# --- a step -----------------------------------------------------------------------------------------------------------


class Mesh:
    """Ranks 0 to 7 of a machine share layers; rank r of every machine shares a part of the parameters."""

    def __init__(self, tensor: int, data: int) -> None:
        self.tensor, self.data = tensor, data
        inside = [dist.new_group(list(range(first, first + tensor))) for first in range(0, tensor * data, tensor)]
        between = [dist.new_group(list(range(first, tensor * data, tensor))) for first in range(tensor)]
        self.inside, self.between = inside[0].group_name, between[0].group_name


class Product(torch.autograd.Function):
    """`x @ weight`, of a weight that every rank has a part of: gathered, and gathered again for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.save_for_backward(x, shard)
        ctx.mesh = mesh
        return x @ gathered(shard, mesh.between, mesh.data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight = gathered(shard, ctx.mesh.between, ctx.mesh.data)
        return gradient @ weight.t(), scattered(x.t() @ gradient, ctx.mesh.between, ctx.mesh.data, "avg"), None


class Rows(torch.autograd.Function):
    """Rows of all ranks of a machine; their gradients are added up, and shared out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return gathered(x, mesh.inside, mesh.tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return scattered(gradient, ctx.mesh.inside, ctx.mesh.tensor), None


class Sums(torch.autograd.Function):
    """What ranks of a machine have parts of, added up; each has its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return scattered(x, mesh.inside, mesh.tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gathered(gradient.contiguous(), ctx.mesh.inside, ctx.mesh.tensor), None


def layer(x: torch.Tensor, weights: Sequence[torch.Tensor], mesh: Mesh, size: int) -> torch.Tensor:
    query, key, value, out, gate, up, down = weights
    rows = Rows.apply(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), mesh)
    projected = [
        Product.apply(rows, each, mesh).unflatten(-1, (-1, size)).transpose(0, 1) for each in (query, key, value)
    ]
    found = Attention.apply(*projected)
    x = x + Sums.apply(Product.apply(found.transpose(0, 1).flatten(1), out, mesh), mesh)
    rows = Rows.apply(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), mesh)
    inner = torch.nn.functional.silu(Product.apply(rows, gate, mesh)) * Product.apply(rows, up, mesh)
    return x + Sums.apply(Product.apply(inner, down, mesh), mesh)


def traced_step(mesh: Mesh, layers: int, width: int, inner: int, tokens: int, device: str) -> torch.fx.GraphModule:
    shapes = [(width, width // mesh.tensor)] * 3 + [(width // mesh.tensor, width)]
    shapes += [(width, inner // mesh.tensor)] * 2 + [(inner // mesh.tensor, width)]

    def step(x: torch.Tensor, *shards: torch.Tensor) -> list[torch.Tensor]:
        y = x
        for first in range(0, len(shards), len(shapes)):
            y = layer(y, shards[first : first + len(shapes)], mesh, 128)
        return list(torch.autograd.grad(y.float().pow(2).mean(), shards))

    with FakeTensorMode():
        kind = {"dtype": torch.bfloat16, "device": device}
        x = torch.empty(tokens // mesh.tensor, width, **kind)  # type: ignore[call-overload]
        shards = [
            torch.empty(rows // mesh.data, columns, requires_grad=True, **kind)  # type: ignore[call-overload]
            for _ in range(layers)
            for rows, columns in shapes
        ]
        return make_fx(step)(x, *shards)


def after(gm: torch.fx.GraphModule, options: Options) -> tuple[Any, float]:
    """What passes make of the collectives, and how long they take."""
    captured = captured_communication(gm, options)
    pipeline = Pipeline("post_grad", tuple(each for each in POST_GRAD.passes if each.name in STEPS))
    start = time.perf_counter()
    run_pipeline(pipeline, gm, PassContext(options, False))
    return communication_of(gm, options, captured), time.perf_counter() - start


@dataclass(frozen=True)
class World:
    """What is assumed of GPUs and links, beside the usual."""

    name: str
    bytes_per_second: float | None = None  # of a copy in the memory of a GPU
    links: float = 1.0  # how fast, of what is assumed


WORLDS = (
    World("as assumed"),
    World("memory as fast as a copy was measured", 4.3e12),
    World("links half as fast", None, 0.5),
)
WAYS = (("scheduled", "auto"), ("moved, products by parts", ["overlap", "async_tp"]))
COLUMNS = (
    "world",
    "collectives",
    "how many",
    "links ms",
    "waited ms",
    "of it FSDP",
    "computing ms",
    "step ms",
    "hidden",
)


def row(world: str, name: str, times: Any, between: str, compute: float) -> tuple[str, ...]:
    """`times`: a record, or what was captured."""
    count = times.collectives if isinstance(times.collectives, int) else len(times.collectives)
    share = f"{max(1 - times.exposed / times.seconds, 0):.0%}"
    one, other, *rest = (
        f"{value * 1e3:.1f}" for value in (times.seconds, times.exposed, compute, compute + times.exposed)
    )
    return (world, name, str(count), one, other, between, *rest, share)


@contextlib.contextmanager
def assumed(world: World) -> Iterator[Path]:
    """The machine of a world is that of the device `meta`; its network is in the file."""
    usual = network_of("meta")

    def scaled(links: Mapping[str, Link]) -> dict[str, Link]:
        return {kind: Link(link.latency, link.bandwidth * world.links) for kind, link in links.items()}

    network = replace(usual, inside=scaled(usual.inside), between=scaled(usual.between))
    machine = gpu_machine() if world.bytes_per_second is None else faster(world.bytes_per_second)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.txt"
        path.write_text(str(network))
        by_device.MACHINES["meta"] = lambda: machine  # type: ignore[index]
        try:
            yield path
        finally:
            del by_device.MACHINES["meta"]  # type: ignore[attr-defined]


def faster(bytes_per_second: float) -> Any:
    return replace(gpu_machine(), copy_bytes_per_second=bytes_per_second)


def step_forecast(chosen: argparse.Namespace) -> None:
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    mesh = Mesh(8, 8)
    rows, computing = [], {}
    for world in WORLDS:
        for place, (name, distributed) in enumerate(WAYS):
            gm = traced_step(mesh, chosen.layers, 4096, 11008, chosen.tokens, "meta")
            with assumed(world) as network:
                options = resolve({"strict": True, "distributed": distributed, "network": network}, environ={})
                record, seconds = after(gm, options)
            computing[world.name] = record.compute_seconds
            if not place:
                rows.append(row(world.name, "as captured", record.captured, "", record.compute_seconds))
            between = sum(each.exposed for each in record.collectives if each.between_machines)
            rows.append(row("", name, record, f"{between * 1e3:.1f}", record.compute_seconds))
            print(f"{world.name}, {name}: {seconds:.1f} s of passes", flush=True)
    network, lines = network_of("meta"), assumptions(chosen, computing)
    show("a step of 7 billion parameters on 64 ranks, forecast", COLUMNS, rows, lines)
    if chosen.write:
        text = [
            *in_markdown(COLUMNS, rows),
            "",
            *(f"- {line}" for line in lines),
            "",
            "```",
            str(network).rstrip(),
            "```",
        ]
        write("distributed-forecast", "A step of seven billion parameters on 64 GPUs, on paper", text)


def assumptions(chosen: argparse.Namespace, computing: Mapping[str, float]) -> list[str]:
    machine, network = gpu_machine(), network_of("meta")
    operations = 6 * chosen.layers * (4 * 4096**2 + 3 * 4096 * 11008) * 8 * chosen.tokens / 64
    least = operations / machine.flops_per_second(2)
    times = ", ".join(f"{seconds * 1e3:.0f} ms ({name})" for name, seconds in computing.items())
    return [
        "Nothing was run: all times are forecasts of the cost model, from operations, bytes and links.",
        f"{chosen.layers} layers of width 4096, 32 heads, an inner width of 11008, bfloat16; embeddings left out.",
        f"{chosen.tokens} tokens for each of 8 data parallel groups; causal attention, of which half is left out.",
        "8 machines of 8 GPUs: layers over the GPUs of one machine (tensor and sequence parallel), parameters over "
        "machines (FSDP, resharded after forward: each is gathered twice, and its gradient scattered once).",
        f"Links: {network.where}, of which collectives get a part: see below. Collectives of one group follow each "
        "other; those of two groups run side by side, and do not slow each other down, nor what is computed, which on "
        "real GPUs they do.",
        f"Computing: {machine.flops_per_second(2) / 1e12:.0f} TFLOP/s in 16 bits, which is near the peak of an H200, "
        f"and memory at {machine.copy_bytes_per_second / 1e12:.1f} TB/s, a quarter of what it copies, with elementwise "
        f"work not fused: {times}. Matrix products alone would take {least * 1e3:.0f} ms. Where computing takes less, "
        "less is hidden behind it: so the second world.",
        "What tensor parallel layers wait for cannot be hidden behind work that needs it: only parts of products help, "
        "and these are forecast as fast as whole ones.",
        "All ranks are equally fast. Optimizer, gradient clipping and loss are not in the graph.",
    ]


# --- how long passes take ---------------------------------------------------------------------------------------------


def chained(x: torch.Tensor, *shards: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for shard in shards:
        x = torch.relu(x @ gathered(shard, "0", 8))
        found.append(scattered(x.t() @ x, "0", 8))
    return found


def chain(number: int) -> torch.fx.GraphModule:
    """Half as many gathers and half as many scatters as asked for, a product between each two."""
    with FakeTensorMode(), torch.no_grad():
        return make_fx(chained)(torch.empty(64, 64), *(torch.empty(8, 64) for _ in range(number // 2)))


def times_of_passes(chosen: argparse.Namespace) -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    options = resolve({"strict": True}, environ={})
    rows = []
    after(chain(20), options)  # imports
    for number in (125, 250, 500, 1000):
        gm = chain(number)
        nodes = len(gm.graph.nodes)
        record, seconds = after(gm, options)
        rows.append(
            (str(number), str(nodes), f"{seconds:.2f}", f"{seconds / number * 1e3:.2f}", str(len(record.collectives)))
        )
    columns = ("collectives", "nodes", "s", "ms for each", "afterwards")
    show("passes over collectives", columns, rows)
    if chosen.write:
        write("distributed-passes", "How long passes over collectives take", in_markdown(columns, rows))


STAGES = ("pre_grad", "capture", "joint", "post_grad", "lower", "schedule", "codegen", "load")


def times_of_compiles(chosen: argparse.Namespace) -> None:
    """The same chain through `torch.compile`, from its first call to its result."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    rows = []
    for number in (20, 125, 250, 500, 1000):
        inputs = torch.randn(64, 64), *(torch.randn(8, 64) for _ in range(number // 2))
        torch._dynamo.reset()
        begin = time.process_time()
        with torch.no_grad():
            torch.compile(chained, backend="ferrite", options={"strict": True}, dynamic=False)(*inputs)
        seconds = time.process_time() - begin
        stages = ferrite.last_compile().stages
        shares = (f"{stages[name] / sum(stages.values()):.0%}" for name in STAGES)
        rows.append((str(number), f"{seconds:.1f}", f"{seconds / number * 1e3:.1f}", *shares))
    rows = rows[1:]  # the first one imports
    columns = ("collectives", "s", "ms for each", *STAGES)
    show("compiling collectives", columns, rows)
    if chosen.write:
        text = """
A chain of gathers, products and scatters through `torch.compile` with `distributed="auto"`, eight imagined ranks,
nothing cached: seconds of a processor from the first call to its result, Dynamo among them, and each stage's part of
what behind Dynamo takes."""
        write(
            "distributed-compile",
            "How long graphs of many collectives take to compile",
            [*in_markdown(columns, rows), *text.split("\n")],
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.distributed_forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--write", action="store_true", help="bench/results/distributed-*-MACHINE.md")
    chosen = parser.parse_args(argv)
    if chosen.passes:
        times_of_passes(chosen)
    if chosen.compile:
        if dist.is_initialized():
            dist.destroy_process_group()
        times_of_compiles(chosen)
    if chosen.step:
        if dist.is_initialized():
            dist.destroy_process_group()
        step_forecast(chosen)


if __name__ == "__main__":
    main()
