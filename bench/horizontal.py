"""When it pays to make several calls as one: linear layers side by side, sums of them, batches of small calls.

    OMP_NUM_THREADS=1 python -m bench.passes horizontal [--rounds N]

Each form stands against the calls that it replaces, in eager, without gradients, turn by turn in one process; below 1
the one call is faster. "Joined before" has weights that were joined once, as freezing does; "joined each time" pays for
the join in every call, as training must. These figures are what the option `horizontal` goes by under `auto`.

One thread, and the fastest round of each: what others do on the same machine only ever adds time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.measure import interleaved

Calls = dict[str, Callable[[], object]]


def same_input(rows: int, features: int, width: int, count: int) -> Calls:
    """Layers on one input, such as the projections of attention."""
    x, weights, biases = torch.rand(rows, features), rand(count, width, features), rand(count, width)
    weight, bias = torch.cat(weights), torch.cat(biases)
    sizes = [width] * count
    return {
        "apart": lambda: [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)],
        "joined before": lambda: F.linear(x, weight, bias).split(sizes, -1),
        "joined each time": lambda: F.linear(x, torch.cat(weights), torch.cat(biases)).split(sizes, -1),
    }


def same_weight(rows: int, features: int, width: int, count: int) -> Calls:
    """One layer on several inputs."""
    xs, weight, bias = rand(count, rows, features), torch.rand(width, features), torch.rand(width)
    return {
        "apart": lambda: [F.linear(x, weight, bias) for x in xs],
        "joined each time": lambda: F.linear(torch.cat(xs), weight, bias).split([rows] * count),
    }


def sum_of_linears(rows: int, features: int, width: int, count: int) -> Calls:
    """Layers on the pieces of one input, added up."""
    x, weights, bias = torch.rand(rows, features * count), rand(count, width, features), torch.rand(width)
    weight = torch.cat(weights, 1)

    def apart() -> torch.Tensor:
        first, *rest = zip(x.split(features, -1), weights, strict=True)
        total = F.linear(*first, bias)
        for piece, own in rest:
            total = total + F.linear(piece, own)
        return total

    return {
        "apart": apart,
        "joined before": lambda: F.linear(x, weight, bias),
        "joined each time": lambda: F.linear(x, torch.cat(weights, 1), bias),
    }


def batched_linear(rows: int, features: int, width: int, count: int) -> Calls:
    xs, weights, biases = rand(count, rows, features), rand(count, width, features), rand(count, width)

    def together() -> object:
        weight, bias = torch.stack(weights).transpose(1, 2), torch.stack(biases).unsqueeze(1)
        return torch.baddbmm(bias, torch.stack(xs), weight).unbind()

    members = list(zip(xs, weights, biases, strict=True))
    return {"apart": lambda: [F.linear(*each) for each in members], "joined each time": together}


def batched(function: Callable[[Any], Any]) -> Callable[..., Calls]:
    def calls(rows: int, features: int, width: int, count: int) -> Calls:
        xs = rand(count, rows, features)
        return {
            "apart": lambda: [function(x) for x in xs],
            "joined each time": lambda: function(torch.stack(xs)).unbind(),
        }

    return calls


def batched_norm(rows: int, features: int, width: int, count: int) -> Calls:
    xs, weights, biases = rand(count, rows, features), rand(count, features), rand(count, features)

    def together() -> object:
        plain = F.layer_norm(torch.stack(xs, 1), (features,))
        return (plain * torch.stack(weights) + torch.stack(biases)).unbind(1)

    members = list(zip(xs, weights, biases, strict=True))
    return {"apart": lambda: [F.layer_norm(x, (features,), w, b) for x, w, b in members], "joined each time": together}


def rand(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.rand(shape) for _ in range(count)]


FORMS: dict[str, tuple[Callable[..., Calls], list[tuple[int, int, int, int]]]] = {
    # (rows, features, width, how many)
    "layers on one input": (
        same_input,
        [(rows, size, size, 3) for size in (16, 64, 256, 768) for rows in (1, 8, 16, 32, 128, 1024)],
    ),
    "one layer on several inputs": (
        same_weight,
        [(rows, size, size, 4) for size in (16, 64, 256, 768) for rows in (1, 4, 16, 128, 512)],
    ),
    "sum of layers on pieces": (
        sum_of_linears,
        [(rows, size, size, 3) for size in (16, 64, 256) for rows in (1, 8, 16, 32, 128, 1024)],
    ),
    "batch of layers": (batched_linear, [(rows, size, size, 6) for size in (8, 32, 128) for rows in (1, 16, 128)]),
    "batch of tanh": (batched(torch.tanh), [(rows, 16, 0, 6) for rows in (1, 16, 256, 4096)]),
    "batch of relu": (batched(torch.relu), [(rows, 16, 0, 32) for rows in (1, 16, 256, 4096)]),
    "batch of layer norms": (batched_norm, [(rows, 32, 0, 6) for rows in (1, 16, 256)]),
}


def rows_of(name: str, rounds: int) -> Iterator[str]:
    form, sizes = FORMS[name]
    for rows, features, width, count in sizes:
        seconds = interleaved(form(rows, features, width, count), rounds)
        cells = []
        for way in ("joined before", "joined each time"):
            if way not in seconds:
                cells.append("")
                continue
            cells.append(f"{min(seconds[way]) / min(seconds['apart']):.2f}")
        apart = min(seconds["apart"]) * 1e6
        yield f"| {name} | {rows} | {features} | {width} | {count} | {apart:.0f} | {cells[0]} | {cells[1]} |"


def rows(rounds: int) -> Iterator[str]:
    yield "| form | rows | features | width | calls | apart, µs | joined before / apart | joined each time / apart |"
    yield "|---" * 8 + "|"
    with torch.no_grad():
        for name in FORMS:
            yield from rows_of(name, rounds)
