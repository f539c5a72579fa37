"""What compiling costs, stage by stage, beside torch's own stages in the same process.

    python -m bench.compile_time [--rounds N] [--layers 3 6 12]

A BERT of few or many layers is compiled again in every round. Dynamo's capture and AOTAutograd are torch's work;
lowering is ours: from the functional graph to the loop program. The last column is what should not grow: seconds of
lowering per layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.measure import write
from ferrite.capture import CapturedGraph, GraphKind, capture
from ferrite.lower import lower_graph
from ferrite.options import Options
from ferrite.runtime import run_in_eager

STAGES = ("dynamo", "aot", "lower")


class Clock:
    """Seconds per stage of one compilation."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.nodes = 0
        self.started = time.perf_counter()

    def backend(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        begun = time.perf_counter()
        self.seconds["dynamo"] += begun - self.started
        compiled = capture(gm, examples, self.compile_graph, Options(), lambda partition: partition)
        self.started = time.perf_counter()
        self.seconds["aot"] += self.started - begun - self.seconds["lower"]
        return compiled

    def compile_graph(self, graph: CapturedGraph) -> Any:
        begun = time.perf_counter()
        if graph.kind is not GraphKind.BACKWARD:
            self.nodes += len(graph.gm.graph.nodes)
            lower_graph(graph)
            self.seconds["lower"] += time.perf_counter() - begun
        return run_in_eager(graph.gm)


def bert(layers: int) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    model: torch.nn.Module = BertModel(BertConfig(num_hidden_layers=layers, **size)).eval()
    return model


def compile_once(model: torch.nn.Module, tokens: torch.Tensor, train: bool) -> Clock:
    torch.compiler.reset()
    clock = Clock()
    with torch.set_grad_enabled(train):
        torch.compile(model, backend=clock.backend)(tokens)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="*", default=[3, 6, 12])
    args = parser.parse_args()
    tokens = torch.randint(0, 100, (2, 16))
    cases = [(layers, train) for layers in args.layers for train in (False, True)]
    models = {layers: bert(layers) for layers in args.layers}
    clocks: dict[tuple[int, bool], list[Clock]] = {case: [] for case in cases}
    compile_once(models[args.layers[0]], tokens, False)  # what torch does once per process
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for layers, train in cases:
            clocks[layers, train].append(compile_once(models[layers], tokens, train))
    columns = ["layers", "graph", "nodes", "Dynamo, s", "AOTAutograd, s", "lowering, s"]
    columns += ["lowering / AOTAutograd", "lowering per layer, ms"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (layers, train), found in clocks.items():
        dynamo, aot, lower = (statistics.median(each.seconds[stage] for each in found) for stage in STAGES)
        share = statistics.median(clock.seconds["lower"] / clock.seconds["aot"] for clock in found)
        kind = "training, forward" if train else "inference"
        figures = (f"{dynamo:.2f}", f"{aot:.2f}", f"{lower:.3f}", f"{share:.2f}", f"{lower / layers * 1000:.1f}")
        lines.append(f"| {layers} | {kind} | {found[0].nodes} | {' | '.join(figures)} |")
    write("compile_time", "Compile time of a BERT, stage by stage", lines)


if __name__ == "__main__":
    main()
