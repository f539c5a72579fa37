"""Whether attention pays as one call: written out, in eager, against the same compiled.

    python -m bench.attention [--rounds N] [--threads N]

Figures are seconds per call, compiled to eager: below 1 is faster. `products`: compiled with the rewrite off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import ferrite
from bench.measure import interleaved, ratio, write

SIZES = (  # batch, heads, queries, keys, width
    (1, 12, 1, 128, 64),
    (8, 12, 1, 512, 64),
    (2, 4, 12, 12, 8),
    (1, 12, 32, 32, 64),
    (1, 12, 128, 128, 64),
    (8, 12, 128, 128, 64),
    (1, 12, 256, 256, 64),
    (8, 12, 256, 256, 64),
    (1, 12, 384, 384, 64),
    (1, 12, 512, 512, 64),
    (1, 12, 1024, 1024, 64),
)
LOWEST = torch.finfo(torch.float32).min


def attention(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    scores = q @ k.transpose(2, 3) * 0.125
    if hidden is not None:
        scores = scores + torch.where(hidden, LOWEST, 0.0)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


def one_call(fn: Callable[..., Any], inputs: list[Any], training: bool) -> Callable[[], object]:
    if training:
        return lambda: torch.autograd.grad(fn(*inputs).sum(), inputs[:3])
    return torch.no_grad()(lambda: fn(*inputs))


def measured(size: tuple[int, ...], masked: bool, training: bool, rounds: int) -> str:
    batch, heads, queries, keys, width = size
    lengths = (queries, keys, keys)
    inputs: list[Any] = [torch.randn(batch, length, heads, width).transpose(1, 2) for length in lengths]
    inputs = [each.requires_grad_(training) for each in inputs]
    inputs.append(torch.rand(batch, 1, 1, keys) > 0.8 if masked else None)
    torch.compiler.reset()
    versions = {
        "eager": attention,
        "ours": ferrite.compile(attention, dynamic=False, attention="always"),
        "products": ferrite.compile(attention, dynamic=False, attention="off"),
    }
    calls = {name: one_call(fn, inputs, training) for name, fn in versions.items()}
    seconds = interleaved(calls, rounds)
    eager = statistics.median(seconds["eager"]) * 1e6
    cells = [
        f"{median:.2f} ({low:.2f} to {high:.2f})"
        for median, low, high in (ratio(seconds[name], seconds["eager"]) for name in ("ours", "products"))
    ]
    kind = "training" if training else "inference"
    return (
        f"| {' x '.join(map(str, size))} | {kind} | {'yes' if masked else 'no'} | {eager:.0f} | {' | '.join(cells)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    lines = [
        f"Batch x heads x queries x keys x width, float32, threads: {chosen.threads}. Median and quartiles of the time "
        "of the compiled function to eager's.",
        "",
        "| size | kind | mask | eager, microseconds | one call | products |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for training in (False, True):
            for masked in (False, True):
                lines.append(measured(size, masked, training, chosen.rounds))
                print(lines[-1], flush=True)
    write("attention", "Attention as one call", lines)


if __name__ == "__main__":
    main()
