"""What the passes cost: seconds per node of the post-grad stage, on graphs of growing size.

    python -m bench.passes [--nodes 2000 20000] [--rounds N]

The stage must be near-linear: the cost per node of the largest graph is given as a ratio to that of the smallest.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bench.measure import write
from ferrite.options import Options
from ferrite.passes import POST_GRAD
from ferrite.pipeline import PassContext, PassRecord, run_pipeline

PER_LAYER = 6  # nodes that one layer of the graph below makes


def graph_of(nodes: int) -> torch.fx.GraphModule:
    """A chain of layers with something to rewrite in each: a product with a bias, a copy, a whole slice."""

    def layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // PER_LAYER):
            x = torch.mm(x, w).add(b).clone().sin()[:] * 0.5
        return x

    return make_fx(layers, tracing_mode="fake")(torch.rand(4, 4), torch.rand(4, 4), torch.rand(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    lines = ["| nodes | rewrites | seconds | microseconds per node | matcher steps per node |", "|---|---|---|---|---|"]
    costs: list[float] = []
    records: list[PassRecord] = []
    for nodes in chosen.nodes:
        seconds: list[float] = []
        for _ in range(chosen.rounds):
            gm, context = graph_of(nodes), PassContext(Options(strict=True), is_inference=True)
            size = len(gm.graph.nodes)
            start = time.perf_counter()
            records = run_pipeline(POST_GRAD, gm, context)
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        costs.append(median / size)
        rewrites = sum(context.rewrites.values())
        lines.append(f"| {size} | {rewrites} | {median:.2f} | {costs[-1] * 1e6:.0f} | {context.steps / size:.2f} |")
        print(lines[-1], flush=True)
    lines += ["", f"Cost per node, largest to smallest graph: {costs[-1] / costs[0]:.2f}", ""]
    lines += ["| pass, on the largest graph | milliseconds | rewrites |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.seconds * 1e3:.0f} | {sum(r.rewrites.values())} |" for r in records]
    write("passes", "Cost of the post-grad stage", lines)


if __name__ == "__main__":
    main()
