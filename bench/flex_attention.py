"""Flex attention on a GPU, with ten masks and functions of scores: ours, Inductor's, eager's dense form, and torch's
attention call where it can do the same.

    python -m bench.flex_attention [--only PATTERN ..] [--width 64 128] [--length 4096] [--backends NAME ..]
                                   [--compile-only] [--out FOLDER]

Microseconds between two events, with the cache of the GPU emptied before each, medians; forward, and backward alone.
Errors are the greatest distance from double precision, over those of eager on the same heads: at most 1 is as exact.
`--compile-only` in several processes first fills the caches, since compiling takes longest. Writes flex-attention.md.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

RESULTS = Path(__file__).parent / "results"
BACKENDS = ("ferrite", "inductor", "sdpa", "eager")
CALLS = 12
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """`mask`: what is allowed, by batch, head, row and key. `sdpa`: how torch's attention call says the same."""

    name: str
    score: Callable[[int, int], Call | None] = lambda length, heads: None
    mask: Callable[[int], Call | None] = lambda length: None
    sdpa: dict[str, Any] | None = None
    groups: int = 1


def causal(length: int) -> Call:
    return lambda b, h, m, n: m >= n


def window(length: int) -> Call:
    return lambda b, h, m, n: (m >= n) & (m - n <= length // 8)


def prefix(length: int) -> Call:
    return lambda b, h, m, n: (m >= n) | (n < length // 4)


def documents(length: int) -> Call:
    ends = torch.tensor([length // 5, length // 2, length * 7 // 10, length], device="cuda")
    document = torch.searchsorted(ends, torch.arange(length, device="cuda"), right=True)
    return lambda b, h, m, n: (document[m] == document[n]) & (m >= n)


def checkered(length: int) -> Call:
    return lambda b, h, m, n: (m // 128 + n // 128) % 4 == 0


def alibi(length: int, heads: int) -> Call:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    return lambda s, b, h, m, n: s + slopes[h] * (n - m)


def relative(length: int, heads: int) -> Call:
    table = torch.randn(heads, 2 * length, device="cuda", dtype=torch.bfloat16)
    return lambda s, b, h, m, n: s + table[h, m - n + length]


def capped(length: int, heads: int) -> Call:
    return lambda s, b, h, m, n: 20.0 * torch.tanh(s / 20.0)


CASES = (
    Case("none", sdpa={}),
    Case("causal", mask=causal, sdpa={"is_causal": True}),
    Case("sliding window", mask=window),
    Case("documents", mask=documents),
    Case("prefix", mask=prefix),
    Case("alibi", score=alibi),
    Case("relative bias", score=relative),
    Case("soft cap", score=capped, mask=causal),
    Case("block sparse", mask=checkered),
    Case("causal, grouped", mask=causal, sdpa={"is_causal": True, "enable_gqa": True}, groups=4),
)


def call_of(case: Case, length: int, heads: int) -> Call:
    mask = case.mask(length)
    blocks = None if mask is None else create_block_mask(mask, None, None, length, length, device="cuda")
    score = case.score(length, heads)
    return lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=case.groups > 1)


def inputs_of(case: Case, batch: int, heads: int, length: int, width: int) -> list[torch.Tensor]:
    many = (heads, heads // case.groups, heads // case.groups)
    return [torch.randn(batch, n, length, width, device="cuda", dtype=torch.bfloat16) for n in many]


def compiled(case: Case, function: Call, backend: str) -> Call | None:
    torch.compiler.reset()
    if backend == "sdpa":
        more = case.sdpa
        return None if more is None else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **more)
    return function if backend == "eager" else torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


class Stopwatch:
    """Times calls with a cache that others have used."""

    def __init__(self) -> None:
        self.other = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # longer than the host takes

    def microseconds(self, call: Callable[[], object], calls: int = CALLS) -> float:
        call()
        found = []
        for _ in range(calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.other.zero_()
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            found.append(before.elapsed_time(after) * 1000)
        return statistics.median(found)


def forward_and_gradients(function: Call, given: Sequence[torch.Tensor], outer: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, outer)]


def errors(case: Case, function: Call, flex: Call, given: Sequence[torch.Tensor]) -> list[float]:
    """Of the result and of three gradients, over eager's on the heads of one head of keys."""
    outer = torch.randn_like(given[0])
    ours = forward_and_gradients(function, given, outer)
    ours = [each[:1, : case.groups if place in (0, 1) else 1] for place, each in enumerate(ours)]
    few = [each[:1, : case.groups if place == 0 else 1] for place, each in enumerate(given)]
    cut = outer[:1, : case.groups]
    eager = forward_and_gradients(flex, few, cut)
    exact = forward_and_gradients(flex, [each.double() for each in few], cut.double())
    return [
        float(((mine - right).abs().max() / (theirs - right).abs().max().clamp_min(1e-30)).item())
        for mine, theirs, right in zip(ours, eager, exact, strict=True)
    ]


def measured(case: Case, backend: str, sizes: tuple[int, int, int, int], watch: Stopwatch | None) -> dict[str, Any]:
    batch, heads, length, width = sizes
    torch.manual_seed(0)
    flex = call_of(case, length, heads)
    function = compiled(case, flex, backend)
    if function is None:
        return {}
    given = [each.requires_grad_() for each in inputs_of(case, batch, heads, length, width)]
    out = function(*given)
    outer = torch.randn_like(out)
    torch.autograd.grad(out, given, outer, retain_graph=True)
    if watch is None:
        return {}
    found: dict[str, Any] = {"forward": watch.microseconds(lambda: function(*given))}
    found["backward"] = watch.microseconds(lambda: torch.autograd.grad(out, given, outer, retain_graph=True))
    if backend == "ferrite":
        found["errors"] = errors(case, function, flex, given)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--width", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    watch = None if chosen.compile_only else Stopwatch()
    lines = []
    for width in chosen.width:
        for case in CASES:
            if chosen.only and not any(each in case.name for each in chosen.only):
                continue
            sizes = chosen.batch, chosen.heads, chosen.length, width
            found = {}
            for backend in chosen.backends:
                try:
                    found[backend] = measured(case, backend, sizes, watch)
                except Exception as problem:  # one that fails is a result, too
                    found[backend] = {}
                    print(f"{case.name} {width} {backend}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if watch is not None:
                lines.append(line_of(case, width, found, chosen.backends))
                print(lines[-1], flush=True)
    if watch is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "flex-attention.md").write_text("\n".join([*head_of(chosen), *lines]) + "\n")


def head_of(chosen: argparse.Namespace) -> list[str]:
    name = torch.cuda.get_device_name(0)
    columns = ["width", "mask", *(f"{each}, {way}" for each in chosen.backends for way in ("forward", "backward"))]
    columns += ["ferrite's errors over eager's: result, dq, dk, dv"]
    return [
        "# Flex attention",
        "",
        f"`python -m bench.flex_attention`, {name}, torch {torch.__version__}: microseconds; batch {chosen.batch}, "
        f"{chosen.heads} heads, length {chosen.length}, bfloat16.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]


def line_of(case: Case, width: int, found: dict[str, dict[str, Any]], backends: Sequence[str]) -> str:
    cells = [str(width), case.name]
    for each in backends:
        cells += [f"{found[each][way]:.0f}" if way in found[each] else "" for way in ("forward", "backward")]
    cells.append(", ".join(f"{each:.2f}" for each in found.get("ferrite", {}).get("errors", [])))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
