"""Matrix products as kernels of our own, beside torch's, on the shapes of real models.

    OMP_NUM_THREADS=1 python -m bench.products [--rounds N] [--only KIND ...]
    python -m bench.products --threads N [--rounds N] [--only KIND ...]

    linear      x @ W.mT                                layers of BERT, ViT, llama (prefill, a few tokens), heads
    frozen      x @ W.mT, W a frozen weight             the same; torch has it frozen, too
    layer       gelu(x @ W.mT + b) + r                  with what follows
    matmul      x @ W                                   rows of W along the columns
    gradient    x.mT @ y                                of a weight
    scores      q @ k.mT, in a batch                    of attention
    values      p @ v, in a batch
    bytes       _int_mm(x, W.mT) * s                    quantised layers: factors of 8 bits, sums of 32
    frozen-bytes  the same, W and s frozen

Each is compiled with `own_products` "off", where torch's kernels are called (in the layouts that they like best), and
"always". Figures are billions of additions and multiplications per second, of processor time: on Arm a part of torch's
kernels has threads of its own, whatever it is told, but for OMP_NUM_THREADS. With several threads, of time that passes.
`to torch`: our time to that of "off", below 1 is faster. `taken`: what "auto" does with such sizes, where torch has all
cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bench.backends import OURS, given_to, with_own_code
from bench.measure import interleaved, ratio, write
from ferrite.machines import MatrixProduct
from ferrite.passes.shared.facts import beside_torch

Sizes = tuple[int, ...]  # (batch,) rows, inner, columns
Function = Callable[..., torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias)) + residual


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mT @ y


def byte_layer(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, weight.mT) * scale


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.mT


LINEAR: tuple[Sizes, ...] = (
    (1, 768, 768),
    (1, 4096, 4096),
    (1, 2048, 1000),
    (2, 768, 3072),
    (4, 4096, 4096),
    (8, 768, 3072),
    (8, 2048, 2048),
    (16, 768, 768),
    (16, 4096, 11008),
    (32, 3072, 768),
    (64, 256, 1024),
    (64, 1024, 256),
    (64, 768, 2),
    (128, 768, 768),
    (128, 768, 3072),
    (128, 3072, 768),
    (128, 4096, 4096),
    (196, 768, 3072),
    (197, 384, 1152),
    (512, 768, 768),
    (512, 3072, 768),
    (3136, 64, 64),
)
FROZEN: tuple[Sizes, ...] = (
    (2, 768, 3072),
    (4, 4096, 4096),
    (8, 768, 3072),
    (16, 768, 768),
    (32, 3072, 768),
    (64, 256, 1024),
    (128, 768, 768),
    (128, 768, 3072),
    (128, 3072, 768),
    (197, 384, 1152),
    (512, 768, 768),
    (512, 3072, 768),
    (3136, 64, 64),
)
LAYER: tuple[Sizes, ...] = ((8, 768, 3072), (128, 768, 3072), (197, 768, 3072), (512, 768, 3072), (3136, 96, 384))
MATMUL: tuple[Sizes, ...] = (
    (1, 4096, 4096),
    (4, 768, 768),
    (16, 768, 768),
    (64, 256, 256),
    (128, 768, 768),
    (128, 3072, 768),
    (512, 768, 768),
    (512, 256, 768),
    (197, 197, 768),
)
GRADIENT: tuple[Sizes, ...] = ((64, 16, 64), (256, 64, 256), (768, 128, 768), (3072, 128, 768), (64, 3136, 64))
SCORES: tuple[Sizes, ...] = (
    (4, 64, 64, 64),
    (12, 128, 64, 128),
    (12, 197, 64, 197),
    (12, 512, 64, 512),
    (64, 49, 32, 49),
    (32, 1, 128, 512),
)
VALUES: tuple[Sizes, ...] = (
    (4, 64, 64, 64),
    (12, 128, 128, 64),
    (12, 197, 197, 64),
    (12, 512, 512, 64),
    (64, 49, 49, 32),
    (32, 1, 512, 128),
)
BYTES: tuple[Sizes, ...] = (
    (1, 768, 768),
    (1, 4096, 4096),
    (2, 768, 3072),
    (4, 4096, 4096),
    (8, 768, 3072),
    (16, 768, 768),
    (32, 3072, 768),
    (64, 256, 1024),
    (64, 768, 2),
    (128, 768, 768),
    (128, 768, 3072),
    (128, 3072, 768),
    (128, 4096, 4096),
    (197, 384, 1152),
    (512, 768, 768),
    (512, 3072, 768),
    (3136, 64, 64),
)
Shapes = Callable[[Sizes], list[Sizes]]
KINDS: dict[str, tuple[Function, tuple[Sizes, ...], Shapes]] = {
    "linear": (linear, LINEAR, lambda s: [(s[0], s[1]), (s[2], s[1])]),
    "frozen": (linear, FROZEN, lambda s: [(s[0], s[1]), (s[2], s[1])]),
    "layer": (layer, LAYER, lambda s: [(s[0], s[1]), (s[2], s[1]), (s[2],), (s[0], s[2])]),
    "matmul": (matmul, MATMUL, lambda s: [(s[0], s[1]), (s[1], s[2])]),
    "gradient": (gradient, GRADIENT, lambda s: [(s[1], s[0]), (s[1], s[2])]),
    "scores": (scores, SCORES, lambda s: [(s[0], s[1], s[2]), (s[0], s[3], s[2])]),
    "values": (matmul, VALUES, lambda s: [(s[0], s[1], s[2]), (s[0], s[2], s[3])]),
    "bytes": (byte_layer, BYTES, lambda s: [(s[0], s[1]), (s[2], s[1]), (s[2],)]),
    "frozen-bytes": (byte_layer, BYTES, lambda s: [(s[0], s[1]), (s[2], s[1]), (s[2],)]),
}
OF_BYTES = ("bytes", "frozen-bytes")


def with_weights(function: Function, weights: Sequence[torch.Tensor]) -> torch.nn.Module:
    """A module that calls the function, of its input and of weights that it has."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return function(x, *self.buffers())

    model: torch.nn.Module = type("Layer", (torch.nn.Module,), {"forward": with_own_code(forward)})()
    for number, weight in enumerate(weights):
        model.register_buffer(f"weight{number}", weight)
    return model.eval()


def operand(kind: str, shape: Sizes) -> torch.Tensor:
    """Random numbers; for products of bytes, matrices of bytes."""
    if kind in OF_BYTES and len(shape) > 1:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape)


def row(kind: str, sizes: Sizes, rounds: int, clock: Callable[[], float]) -> tuple[str, float, bool]:
    """A line of the table, our time to torch's, and whether ours is taken."""
    function, _, shapes = KINDS[kind]
    is_frozen = kind.startswith("frozen")
    inputs = [operand(kind, shape) for shape in shapes(sizes)]

    def call(products: str) -> Callable[[], object]:
        if is_frozen:
            model = with_weights(function, inputs[1:])
            frozen = given_to(OURS, model, own_products=products, freeze=True)
            return lambda: frozen(inputs[0])
        compiled = given_to(OURS, with_own_code(function), own_products=products)
        return lambda: compiled(*inputs)

    rows, inner, columns = sizes[-3:]
    along = kind in ("linear", "frozen", "layer", "scores", *OF_BYTES)
    problem = MatrixProduct(rows, inner, columns, along, in_panels=is_frozen)
    beside = beside_torch().byte_product if kind in OF_BYTES else beside_torch().product
    taken = beside(problem) is None
    seconds = interleaved({"torch": call("off"), "own": call("always")}, rounds, 0.01, clock=clock)
    work = 2 * math.prod(sizes) / 1e9
    speeds = [f"{work / statistics.median(seconds[name]):.1f}" for name in ("torch", "own")]
    middle, low, high = ratio(seconds["own"], seconds["torch"])
    text = f"| {kind} | {', '.join(map(str, sizes))} | {' | '.join(speeds)} | {middle:.2f} ({low:.2f} to {high:.2f}) "
    return text + f"| {'yes' if taken else 'no'} |", middle, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    lines = ["| kind | sizes | torch | own | to torch | taken |", "|---|---|---|---|---|---|"]
    found: list[tuple[float, bool]] = []
    with torch.no_grad():
        for kind in chosen.only:
            for sizes in KINDS[kind][1]:
                line, to_torch, taken = row(kind, sizes, chosen.rounds, clock)
                found.append((to_torch, taken))
                lines.append(line)
                print(line, flush=True)
    for name, some in (("all", found), ("those that are taken", [each for each in found if each[1]])):
        if some:
            lines += ["", f"Geometric mean of {name}: {statistics.geometric_mean(each for each, _ in some):.2f}"]
    suffix = "" if chosen.threads == 1 else f"-{chosen.threads}-threads"
    name = "byte-products" if set(chosen.only) <= set(OF_BYTES) else "products"
    write(f"{name}{suffix}", f"Matrix products, threads: {chosen.threads}", lines)


if __name__ == "__main__":
    main()
