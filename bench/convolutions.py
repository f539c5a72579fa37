"""Convolutions as kernels of our own, beside torch's, on the shapes of real models.

    python -m bench.convolutions [--rounds N] [--threads N] [--last] [--batch N] [--only MODEL ...]
    python -m bench.convolutions --models NAME ... [--rounds N] [--threads N] [--batch N]

Each is `conv2d(x, weight, bias)` of one layer: in eager (`torch`), compiled with `own_convolutions` "off", where other
rules may make a product of it or lay out the image anew, and "always". `--last`: images come, and go, with the channels
side by side, as they do inside of a model whose convolutions are ours; otherwise they are turned in each call. Figures
are billions of additions and multiplications per second, with one thread of processor time: on Arm a part of torch's
kernels has threads of its own, whatever it is told. `limit`: our share of what torch reaches with a product of large
matrices in the same run. `to torch`: our time to the better one of the others, below 1 is faster.

`--models`: whole models of `bench.zoo` instead, inference. Milliseconds in eager, compiled with `own_convolutions`
"off" and "auto", and with "auto" and frozen weights; `to off`: the time of "auto" to that of "off"; `frozen to auto`:
that of frozen weights to that of "auto".
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.backends import OURS, given_to, with_own_code
from bench.measure import interleaved, ratio, write
from bench.zoo import find, floats_of

# channels of the image, of the result, height and width, window, step, groups
Layer = tuple[int, int, int, int, int, int]
LAYERS: dict[str, tuple[Layer, ...]] = {
    "resnet": (
        (3, 64, 224, 7, 2, 1),
        (64, 64, 56, 1, 1, 1),
        (64, 64, 56, 3, 1, 1),
        (64, 256, 56, 1, 1, 1),
        (256, 64, 56, 1, 1, 1),
        (256, 512, 56, 1, 2, 1),
        (128, 128, 56, 3, 2, 1),
        (128, 128, 28, 3, 1, 1),
        (128, 512, 28, 1, 1, 1),
        (512, 256, 28, 1, 1, 1),
        (256, 256, 14, 3, 1, 1),
        (256, 1024, 14, 1, 1, 1),
        (1024, 256, 14, 1, 1, 1),
        (512, 512, 14, 3, 2, 1),
        (512, 512, 7, 3, 1, 1),
        (512, 2048, 7, 1, 1, 1),
        (2048, 512, 7, 1, 1, 1),
    ),
    "mobilenet": (
        (3, 16, 224, 3, 2, 1),
        (16, 64, 112, 1, 1, 1),
        (64, 24, 56, 1, 1, 1),
        (40, 240, 28, 1, 1, 1),
        (200, 80, 14, 1, 1, 1),
        (112, 672, 14, 1, 1, 1),
        (160, 960, 7, 1, 1, 1),
    ),
    "efficientnet": (
        (3, 32, 224, 3, 2, 1),
        (24, 144, 56, 1, 1, 1),
        (240, 80, 14, 1, 1, 1),
        (1152, 320, 7, 1, 1, 1),
    ),
    "convnext": ((3, 96, 224, 4, 4, 1), (96, 192, 56, 2, 2, 1), (384, 768, 14, 2, 2, 1)),
    "densenet": (
        (128, 32, 56, 3, 1, 1),
        (256, 128, 56, 1, 1, 1),
        (128, 32, 28, 3, 1, 1),
        (512, 128, 28, 1, 1, 1),
        (128, 32, 14, 3, 1, 1),
        (128, 32, 7, 3, 1, 1),
    ),
    "unet": ((64, 64, 128, 3, 1, 1), (192, 64, 128, 3, 1, 1), (256, 256, 32, 3, 1, 1)),
}
LIMIT_SIDE = 512
WAYS: dict[str, dict[str, object]] = {
    "off": {"own_convolutions": "off"},
    "auto": {"own_convolutions": "auto"},
    "frozen": {"own_convolutions": "auto", "freeze": True},
}


def padding_of(layer: Layer) -> int:
    _, _, _, window, step, _ = layer
    return 0 if window == step else window // 2


def row(
    layer: Layer, batch: int, last: bool, rounds: int, limit: float, clock: Callable[[], float]
) -> tuple[list[str], float]:
    """Cells of a line of the table, and our time to torch's."""
    inputs, outputs, size, window, step, groups = layer
    padding = padding_of(layer)
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(batch, inputs, size, size).to(memory_format=layout)
    weight, bias = torch.randn(outputs, inputs // groups, window, window) / 8, torch.randn(outputs)

    def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, bias, step, padding, 1, groups)

    def call(convolutions: str) -> Callable[[], object]:
        compiled = given_to(OURS, with_own_code(convolved), own_convolutions=convolutions)
        return lambda: compiled(x, weight, bias)

    calls = {"torch": lambda: convolved(x, weight, bias), "off": call("off"), "own": call("always")}
    seconds = interleaved(calls, rounds, 0.005, clock=clock)
    work = 2 * convolved(x, weight, bias).numel() * math.prod(weight.shape[1:]) / 1e9
    speeds = {name: work / statistics.median(seconds[name]) for name in calls}
    best = max(("torch", "off"), key=speeds.__getitem__)
    middle, low, high = ratio(seconds["own"], seconds[best])
    cells = [f"{speed:.1f}" for speed in speeds.values()]
    return [*cells, f"{speeds['own'] / limit:.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"], middle


def multiply_adds(rounds: int, clock: Callable[[], float]) -> float:
    """What the processor can do, in billions per second: the best of some large products."""
    a, b = torch.randn(LIMIT_SIDE, LIMIT_SIDE), torch.randn(LIMIT_SIDE, LIMIT_SIDE)
    seconds = interleaved({"product": lambda: a @ b}, rounds, 0.02, clock=clock)["product"]
    return 2 * LIMIT_SIDE**3 / 1e9 / min(seconds)


def model_row(name: str, batch: int, rounds: int, clock: Callable[[], float]) -> list[str]:
    """Cells of a line about a model."""
    torch._dynamo.reset()
    known = find(name)
    model, inputs = known.ready(torch.float32, False), known.inputs(batch, torch.float32, False)
    compiled = {way: given_to(OURS, model, **options) for way, options in WAYS.items()}
    expected = list(floats_of(model(**inputs)))
    for function in compiled.values():
        for ours, theirs in zip(floats_of(function(**inputs)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

    def call(function: Callable[..., object]) -> Callable[[], object]:
        return lambda: function(**inputs)

    seconds = interleaved({way: call(each) for way, each in {"eager": model, **compiled}.items()}, rounds, clock=clock)
    cells = [f"{statistics.median(each) * 1e3:.1f}" for each in seconds.values()]
    for ours, theirs in (("auto", "off"), ("frozen", "auto")):
        middle, low, high = ratio(seconds[ours], seconds[theirs])
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return [name, *cells]


def models(names: list[str], threads: int, batch: int, rounds: int, clock: Callable[[], float]) -> None:
    columns = ["model", "eager", *WAYS, "to off", "frozen to auto"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name in names:
        lines.append(f"| {' | '.join(model_row(name, batch, rounds, clock))} |")
        print(lines[-1], flush=True)
    suffix = f"-{threads}-threads" if threads > 1 else ""
    write(f"convolutions-models{suffix}", f"Models with convolutions, threads: {threads}, batch: {batch}", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    if chosen.models:
        with torch.no_grad():
            models(chosen.models, chosen.threads, chosen.batch, chosen.rounds, clock)
        return
    limit = multiply_adds(chosen.rounds, clock)
    names = "model | in | out | size | window | step | torch | off | own | limit | to torch"
    lines = [f"| {names} |", f"|{'---|' * (names.count('|') + 1)}"]
    found: list[float] = []
    with torch.no_grad():
        for model in chosen.only:
            for layer in LAYERS[model]:
                cells, to_torch = row(layer, chosen.batch, chosen.last, chosen.rounds, limit, clock)
                found.append(to_torch)
                lines.append(f"| {' | '.join([model, *map(str, layer[:-1]), *cells])} |")
                print(lines[-1], flush=True)
    lines += ["", f"Geometric mean: {statistics.geometric_mean(found):.2f}"]
    print(lines[-1])
    layout = "channels side by side" if chosen.last else "contiguous"
    write(
        "convolutions"
        + ("-last" if chosen.last else "")
        + (f"-{chosen.threads}-threads" if chosen.threads > 1 else ""),
        f"Convolutions, threads: {chosen.threads}, batch: {chosen.batch}, images {layout}",
        lines,
    )


if __name__ == "__main__":
    main()
