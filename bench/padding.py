"""Whether products pay with padded sides, on a GPU: `python -m bench.passes padding --device cuda`.

Each product runs as it is, and after the pass pad_mm with `pad_mm="always"`, both in eager, turn by turn. Below 1 the
padded one is faster, its copies included. "Fires" is what the pass does by itself (`auto`): it should be what is below
1. `training` is a linear layer with both gradients, compiled: its three products are padded in the joint graph.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from bench.measure import interleaved, ratio
from ferrite.options import Options
from ferrite.passes.joint import pad_mm
from ferrite.pipeline import PassContext

aten = torch.ops.aten
SIDES = (  # m, k, n
    (4095, 4095, 4095),
    (2047, 2047, 2047),
    (2048, 2048, 2047),
    (2048, 2047, 2048),
    (8192, 1024, 50257),  # the head of a language model
    (1023, 1023, 1023),
    (511, 511, 511),
    (2047, 2047, 3),
    (2048, 2048, 2048),  # aligned: nothing to do
)


def product_calls(sides: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[bool, dict[str, Any]]:
    m, k, n = sides
    a, b = torch.randn(m, k, dtype=dtype, device=device), torch.randn(k, n, dtype=dtype, device=device)
    graph = make_fx(aten.mm.default, tracing_mode="fake")(a, b)
    padded, by_itself = copy.deepcopy(graph), copy.deepcopy(graph)
    pad_mm.function(padded, PassContext(Options(pad_mm="always")))
    fires = bool(pad_mm.function(by_itself, PassContext(Options())))
    for each in (graph, padded):
        each.recompile()
    return fires, {"as it is": lambda: graph(a, b), "padded": lambda: padded(a, b)}


def training_calls(sides: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[bool, dict[str, Any]]:
    m, k, n = sides
    x = torch.randn(m, k, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(n, k, dtype=dtype, device=device, requires_grad=True)
    tangent = torch.randn(m, n, dtype=dtype, device=device)

    def compiled(way: str) -> Callable[[], object]:
        torch.compiler.reset()
        layer = ferrite.compile(torch.nn.functional.linear, dynamic=False, pad_mm=way)

        def call() -> object:
            return torch.autograd.grad(layer(x, weight), (x, weight), tangent)

        call()
        return call

    calls = {"as it is": compiled("off"), "padded": compiled("always")}
    compiled("auto")
    return bool(ferrite.last_compile().rewrites.get("pad_mm", 0)), calls


def waited(call: Callable[[], object], device: str) -> Callable[[], object]:
    def whole() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return whole


def rows(rounds: int, device: str) -> Iterator[str]:
    yield "| m, k, n | dtype | kind | fires | as it is, µs | padded to as it is |"
    yield "|---|---|---|---|---|---|"
    for dtype in (torch.bfloat16, torch.float32):
        for kind, make in (("product", product_calls), ("training", training_calls)):
            for sides in SIDES:
                fires, calls = make(sides, dtype, device)
                calls = {name: waited(call, device) for name, call in calls.items()}
                seconds = interleaved(calls, rounds)
                middle, low, high = ratio(seconds["padded"], seconds["as it is"])
                micros = statistics.median(seconds["as it is"]) * 1e6
                name, own = str(dtype).removeprefix("torch."), "yes" if fires else "no"
                figure = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                yield f"| {', '.join(map(str, sides))} | {name} | {kind} | {own} | {micros:.0f} | {figure} |"
