"""Linear layers on few rows whose weights are stored as integers of 8 bits, on a GPU: ours with every configuration
that may be the fastest, and what torch has.

    python -m bench.gpu_short_weights [--only PATTERN ..] [--rows 1 8 ..] [--seconds 100] [--most 16]

`scaled before`: `x @ (weight.to(bf16) * scale).t()`; `behind`: `(x @ weight.to(bf16).t()) * scale`. Beside them torch's
call with a weight that is in 16 bits already, eager's as written, and `torch._weight_int8pack_mm` where it is there.
Microseconds between two events, with the cache of the GPU emptied before each, medians; `floor`: the time that the
memory takes for the weight alone, at 4.3e12 bytes a second. A result that is farther from double precision than eager's
is no result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite.passes  # noqa: F401  # registers torch.ops.ferrite
from ferrite.errors import Refusal
from ferrite.schedule.gpu import candidates
from ferrite.targets.cuda import CUDA
from ferrite.targets.trials import Stopwatch, compiled_trials, farthest, reason_against
from ferrite.tune import Measured, ProductConfig, ProductProblem, configurations

WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 1024))
ROWS = (1, 4, 16, 64)
BYTES_PER_MICROSECOND = 4.3e6
Function = Callable[..., Any]
MORE = (
    ProductConfig(16, 16, 512, warps=2, stages=4),
    ProductConfig(16, 16, 512, warps=4, stages=4),
    ProductConfig(16, 32, 512, warps=4, stages=3),
    ProductConfig(16, 64, 256, warps=4, stages=3),
    ProductConfig(16, 64, 256, warps=4, stages=4),
    ProductConfig(16, 32, 256, warps=4, stages=5),
    ProductConfig(16, 128, 128, warps=4, stages=4),
)


def made(rows: int, columns: int, summed: int) -> list[torch.Tensor]:
    x = torch.randn(rows, summed, device="cuda", dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (columns, summed), device="cuda", dtype=torch.int8)
    return [x, weight, torch.rand(columns, device="cuda").to(torch.bfloat16) / 100]


def scaled_before(product: Function) -> Function:
    return lambda x, w, s: product(x, (w.to(x.dtype) * s[:, None]).t())


def scaled_behind(product: Function) -> Function:
    return lambda x, w, s: product(x, w.to(x.dtype).t()) * s


SPELLINGS = {"behind": scaled_behind, "before": scaled_before}


def measured(rows: int, weight: tuple[int, int], spelling: str, most: int, watch: Stopwatch) -> str:
    x, w, s = given = made(rows, *weight)
    eager = SPELLINGS[spelling](torch.matmul)
    exact = eager(*(each.double() for each in given))
    allowed = farthest(eager(*given), exact)
    long = w.to(x.dtype) * s[:, None]
    times = {"bf16": watch.microseconds(lambda *_: x @ long.t()), "eager": watch.microseconds(eager, *given)}
    try:
        torch._weight_int8pack_mm(x, w, s)
        times["int8pack"] = watch.microseconds(torch._weight_int8pack_mm, *given)
    except (RuntimeError, NotImplementedError):
        pass
    problem = ProductProblem("bf16", 1, rows, *weight, "summed", "summed")
    configs = list(dict.fromkeys([*candidates(problem, CUDA.scheduling.machine)[:most], *(MORE if rows <= 16 else ())]))
    function = SPELLINGS[spelling](torch.ops.ferrite.product)
    graph = make_fx(lambda *inputs: [function(*inputs)], tracing_mode="fake")(*given)
    tuned = [configurations({problem: Measured(0, 0, config)}) for config in configs]
    ours: dict[str, float] = {}
    for config, trial in zip(configs, compiled_trials(graph, CUDA, tuned), strict=True):
        if isinstance(trial, Refusal):
            print(f"    refused: {config}: {trial.reason[:80]}")
            continue
        wrong = reason_against(trial(*given), [exact], [allowed])
        if wrong:
            print(f"    wrong: {config}: {wrong}")
            continue
        ours[str(config)] = watch.microseconds(trial, *given)
    best = sorted(ours, key=ours.__getitem__)
    others = " | ".join(f"{times[name]:.1f}" if name in times else "" for name in ("bf16", "eager", "int8pack"))
    floor = weight[0] * weight[1] / BYTES_PER_MICROSECOND
    cells = "; ".join(f"{ours[each]:.1f} {each}" for each in best[:4])
    likely = ours.get(str(configs[0]), float("nan"))
    name = f"{rows} x {weight[0]} x {weight[1]}, {spelling}"
    return f"| {name} | {others} | {likely:.1f} | {floor:.1f} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--spelling", nargs="*", default=list(SPELLINGS), choices=list(SPELLINGS))
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--most", type=int, default=16)
    chosen = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    watch = Stopwatch()
    print(
        "| product | torch, bf16 | eager | int8pack | ours, not measured | floor | ours |"
        "\n|---|---|---|---|---|---|---|"
    )
    with torch.no_grad():
        for weight in WEIGHTS:
            for rows in chosen.rows:
                for spelling in chosen.spelling:
                    if time.perf_counter() - began > chosen.seconds:
                        print("no time for more")
                        return
                    print(measured(rows, weight, spelling, chosen.most, watch), flush=True)


if __name__ == "__main__":
    main()
