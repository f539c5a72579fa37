"""Compile a small model through the cache and say what it answered: here, or as a program of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ferrite.cache import NewEntry, explain, graph_key, look_up, open_store
from ferrite.capture import CapturedGraph, capture
from ferrite.options import resolve
from ferrite.runtime import run_in_eager


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.norm(self.linear(x))) + torch.tensor([0.5])


def compile_and_ask(size: int) -> list[list[Any]]:
    """For each graph: what it is, hit or miss, what differed, its digest, and what was remembered of it."""
    options, outcomes = resolve(), []
    store = open_store(options)

    def compile_graph(graph: CapturedGraph) -> Any:
        lookup = look_up(
            store,
            # ferrite itself may be edited between one run and the other
            lambda: graph_key(graph, options, target="this one", sources="as they are"),
            graph.kind.value,
            lambda artifact: artifact.metadata["nodes"],
        )
        nodes = lookup.found or len(graph.gm.graph.nodes)
        outcome = lookup.publish(lambda: NewEntry({"code": b"x"}, {"nodes": nodes}))
        differing = [each.name for each in (explain(outcome) or (None, []))[1]]
        outcomes.append([outcome.what, outcome.result, differing, outcome.key.digest, nodes])
        return run_in_eager(graph.gm)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return capture(gm, inputs, compile_graph, options)

    torch.compile(Net(), backend=backend, dynamic=True)(torch.randn(size, 8)).sum().backward()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(compile_and_ask(int(sys.argv[1]))))
