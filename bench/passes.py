"""What the passes cost and what they gain.

    python -m bench.passes cost [--nodes 2000 20000]    seconds per node of the post-grad stage, on growing graphs
    python -m bench.passes rewrites                     each pre-grad pass on a piece of a model: see `bench.rewrites`
    python -m bench.passes horizontal                   several calls as one, over many sizes: see `bench.horizontal`
    python -m bench.passes padding --device cuda        products with padded sides: see `bench.padding`

Each takes `--rounds N`. The stage must be near-linear: the cost per node of the largest graph is given as a ratio to
that of the smallest.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bench import horizontal, padding, rewrites
from bench.measure import write
from ferrite.options import Options
from ferrite.passes import POST_GRAD
from ferrite.pipeline import PassContext, PassRecord, run_pipeline

PER_LAYER = 6  # nodes that one layer of the graph below makes
ROUNDS = {"cost": 3, "rewrites": 31, "horizontal": 40, "padding": 15}


def graph_of(nodes: int) -> torch.fx.GraphModule:
    """A chain of layers with something to rewrite in each: a product with a bias, a copy, a whole slice."""

    def layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // PER_LAYER):
            x = torch.mm(x, w).add(b).clone().sin()[:] * 0.5
        return x

    return make_fx(layers, tracing_mode="fake")(torch.rand(4, 4), torch.rand(4, 4), torch.rand(4))


def cost(sizes: Iterable[int], rounds: int) -> list[str]:
    lines = ["| nodes | rewrites | seconds | microseconds per node | matcher steps per node |", "|---|---|---|---|---|"]
    costs: list[float] = []
    records: list[PassRecord] = []
    for nodes in sizes:
        seconds: list[float] = []
        for _ in range(rounds):
            gm, context = graph_of(nodes), PassContext(Options(strict=True), is_inference=True)
            size = len(gm.graph.nodes)
            start = time.perf_counter()
            records = run_pipeline(POST_GRAD, gm, context)
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        costs.append(median / size)
        found = sum(context.rewrites.values())
        lines.append(f"| {size} | {found} | {median:.2f} | {costs[-1] * 1e6:.0f} | {context.steps / size:.2f} |")
        print(lines[-1], flush=True)
    lines += ["", f"Cost per node, largest to smallest graph: {costs[-1] / costs[0]:.2f}", ""]
    lines += ["| pass, on the largest graph | milliseconds | rewrites |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.seconds * 1e3:.0f} | {sum(r.rewrites.values())} |" for r in records]
    return lines


def shown(lines: Iterable[str]) -> list[str]:
    """All of them, each printed as it comes."""
    kept = []
    for line in lines:
        print(line, flush=True)
        kept.append(line)
    return kept


@contextlib.contextmanager
def tensor_float() -> Iterator[None]:
    """Single precision on the matrix units of a GPU, without which padding gains nothing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(ROUNDS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="cpu", help="for rewrites and padding")
    parser.add_argument("--compiled", action="store_true", help="for rewrites: as ferrite compiles them, not in eager")
    parser.add_argument("--only", default="", help="for rewrites: passes whose name holds this")
    parser.add_argument("--busy", action="store_true", help="for rewrites: one thread, by its own CPU time")
    chosen = parser.parse_args()
    if chosen.busy:
        torch.set_num_threads(1)
    rounds = chosen.rounds or ROUNDS[chosen.what]
    match chosen.what:
        case "cost":
            write("passes", "Cost of the post-grad stage", cost(chosen.nodes, rounds))
        case "rewrites":
            where = [chosen.device] if chosen.device != "cpu" else []
            name = "-".join(["rewrites", *(["compiled"] if chosen.compiled else []), *where])
            how = f"Device: {chosen.device}, float32. Threads: {torch.get_num_threads()}. Median and quartiles of "
            lines = [
                f"{how}{rounds} rounds.",
                "",
                *shown(rewrites.rows(rounds, chosen.device, chosen.only, chosen.compiled, chosen.busy)),
            ]
            if not chosen.only:
                write(name, "Passes before autograd, one by one", lines)
        case "horizontal":
            write("horizontal", "Several calls as one", shown(horizontal.rows(rounds)))
        case "padding":
            how = f"Device: {chosen.device}. Median and quartiles of {rounds} rounds."
            with tensor_float():
                write(
                    f"padding-{chosen.device}",
                    "Padded products",
                    [how, "", *shown(padding.rows(rounds, chosen.device))],
                )


if __name__ == "__main__":
    main()
