"""Whether attention pays as one call: written out, in eager, against the same compiled; and as a kernel of our own.

    python -m bench.attention [--rounds N] [--threads N]
    python -m bench.attention --kernels [--only NAME ..] [--dtype bfloat16] [--rounds N] [--threads N] [--wall]

Figures are seconds per call, compiled to eager: below 1 is faster. `products`: compiled with the rewrite off.

`--kernels`: attention of models (`scaled_dot_product_attention`, and flex attention with masks) as a kernel of our own
(`own_attention="always"`), beside torch's kernel, called from the same compiled program (`off`), eager and Inductor.
Errors are the greatest distance from double precision. With one thread what is timed is what this thread computes,
whatever others do; `--wall` times the clock on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ferrite
from bench.backends import OURS, given_to, with_own_code
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


# --- as a kernel of our own -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`how`: what the call of torch is given; `mask`: of flex attention instead, by the length, what is allowed."""

    batch: int
    heads: int
    rows: int
    keys: int
    width: int
    key_heads: int = 0
    how: dict[str, Any] = field(default_factory=dict)
    has_bias: bool = False
    mask: Callable[[int], Callable[..., Any]] | None = None


def window(length: int) -> Callable[..., Any]:
    return lambda b, h, m, n: (m >= n) & (m - n <= length // 8)


def documents(length: int) -> Callable[..., Any]:
    ends = torch.tensor([length // 5, length // 2, length * 7 // 10, length])
    document = torch.searchsorted(ends, torch.arange(length), right=True)
    return lambda b, h, m, n: (document[m] == document[n]) & (m >= n)


def until(length: int) -> Callable[..., Any]:
    return lambda b, h, m, n: n <= length - 100


GROUPED = {"enable_gqa": True}
CASES = {
    "bert 128": Case(1, 12, 128, 128, 64),
    "bert 128, batch of 8": Case(8, 12, 128, 128, 64),
    "bert 384, padded": Case(1, 12, 384, 384, 64, has_bias=True),
    "vit": Case(1, 12, 197, 197, 64),
    "vit, batch of 8": Case(8, 12, 197, 197, 64),
    "swin": Case(64, 3, 49, 49, 32),
    "short": Case(2, 4, 12, 12, 8),
    "gpt2 1024": Case(1, 12, 1024, 1024, 64, how={"is_causal": True}),
    "llama prefill 512": Case(1, 8, 512, 512, 128, 2, {"is_causal": True, **GROUPED}),
    "llama decode 1024": Case(1, 32, 1, 1024, 128, 8, GROUPED),
    "llama decode 4096": Case(1, 32, 1, 4096, 128, 8, GROUPED),
    "gpt2 decode 512": Case(1, 12, 1, 512, 64),
    "whisper across": Case(1, 8, 4, 1500, 64),
    "flex: sliding window 2048": Case(1, 8, 2048, 2048, 64, mask=window),
    "flex: documents 1024": Case(1, 8, 1024, 1024, 64, mask=documents),
    "flex: decode with a cache": Case(1, 32, 1, 1024, 128, 8, GROUPED, mask=until),
}


def function_of(case: Case) -> Callable[..., Any]:
    if case.mask is None:
        return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias, **case.how)
    blocks = create_block_mask(case.mask(case.keys), None, None, case.rows, case.keys, device="cpu")
    return lambda q, k, v, bias: flex_attention(q, k, v, block_mask=blocks, **case.how)


def kernel_row(name: str, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> str:
    case = CASES[name]
    torch.compiler.reset()
    many = (case.heads, case.key_heads or case.heads, case.key_heads or case.heads)
    lengths = (case.rows, case.keys, case.keys)
    inputs: list[Any] = [
        torch.randn(case.batch, length, heads, case.width, dtype=dtype).transpose(1, 2)
        for heads, length in zip(many, lengths, strict=True)
    ]
    padding = torch.where(torch.arange(case.keys) < case.keys * 3 // 4, 0.0, LOWEST).expand(case.batch, 1, 1, -1)
    inputs.append(padding.to(dtype) if case.has_bias else None)
    attend = function_of(case)
    versions = {
        "eager": attend,
        "inductor": given_to("inductor", with_own_code(attend)),
        "off": given_to(OURS, with_own_code(attend), own_attention="off"),
        "own": given_to(OURS, with_own_code(attend), own_attention="always"),
    }
    if case.mask is not None:
        del versions["off"]  # is ours in any case
    with torch.no_grad():
        exact = attend(*(None if each is None else each.double() for each in inputs))
        errors = [f"{(versions[each](*inputs) - exact).abs().max():.1e}" for each in ("own", "eager")]
        calls: dict[str, Callable[[], object]] = {
            way: torch.no_grad()(lambda fn=fn: fn(*inputs))  # type: ignore[misc]
            for way, fn in versions.items()
        }
        seconds = interleaved(calls, rounds, clock=clock)
    cells = [f"{statistics.median(seconds[way]) * 1e6:.0f}" if way in seconds else "" for way in WAYS]
    for other in WAYS[:-1]:
        cells.append(
            "{:.2f} ({:.2f} to {:.2f})".format(*ratio(seconds["own"], seconds[other])) if other in seconds else ""
        )
    return f"| {name} | {' | '.join([*cells, *errors])} |"


WAYS = ("eager", "inductor", "off", "own")


def kernels(chosen: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    clock = time.thread_time if chosen.threads == 1 and not chosen.wall else time.perf_counter
    ours = [f"own to {other}" for other in WAYS[:-1]]
    columns = ["case", *(f"{way}, microseconds" for way in WAYS), *ours, "error of own", "of eager"]
    lines = [
        f"{chosen.dtype}, threads: {chosen.threads}. Microseconds, medians; then medians and quartiles of ratios.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for name in CASES:
        if chosen.only and not any(each in name for each in chosen.only):
            continue
        try:
            lines.append(kernel_row(name, getattr(torch, chosen.dtype), chosen.rounds, clock))
        except Exception as problem:  # one that fails is a result, too
            lines.append(f"| {name} | {type(problem).__name__}: {str(problem)[:100]} |")
        print(lines[-1], flush=True)
    part = "" if chosen.threads == 1 else f"-{chosen.threads}-threads"
    part += "" if chosen.dtype == "float32" else f"-{chosen.dtype}"
    if not chosen.only:
        write(f"attention-kernels{part}", "Attention as a kernel of our own", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--wall", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    if chosen.kernels:
        kernels(chosen)
        return
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
