"""Kernels on a GPU, turn by turn in one process (`python -m bench.gpu kernels`).

Microseconds on the GPU between two events, with the cache of the GPU emptied before each, medians. What a copy of the
same number of bytes takes, measured in the same run, is the limit; `of the limit` says how much of its speed ferrite
has. `--size large` has tensors of 268 MB and more, where the start and the end of a kernel count for little.
"ferrite, dynamic" among the backends is compiled for any sizes, "ferrite, any rows" for any number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.backends import given_to, with_own_code

DEVICE = "cuda"
ROUNDS = 30
TRAINING_AHEAD = 12  # see `Clock.microseconds`: guards, autograd and two programs
SIZES = {"usual": 1, "large": 4}  # times 67 MB, in 16 bits
DYNAMIC, ANY_ROWS = ", dynamic", ", any rows"
Function = Callable[..., Any]
Case = tuple[str, Function, list[Any], int]


def median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers) if numbers else float("nan")


def compiled(function: Function, name: str) -> Function:
    if name == "eager":
        return function
    if name.endswith(ANY_ROWS):
        return for_any_rows(function, name.removesuffix(ANY_ROWS))
    if not name.endswith(DYNAMIC):
        return torch.compile(function, backend=name)  # type: ignore[no-any-return]
    return given_to(name.removesuffix(DYNAMIC), with_own_code(function), dynamic=True)


def for_any_rows(function: Function, backend: str) -> Function:
    """A function compiled for any length of the first dimension of what has several. What is marked so are other
    tensors with the same memory."""
    made = torch.compile(with_own_code(function), backend=backend)
    marked: dict[int, torch.Tensor] = {}

    def other(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in marked:
            marked[id(x)] = x.view_as(x) if x.requires_grad else x.detach()
            if x.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(marked[id(x)], 0)
        return marked[id(x)]

    return lambda *inputs: made(*map(other, inputs))


def backends_for(function: Function, inputs: Sequence[Any], names: Sequence[str]) -> tuple[dict[str, Function], dict]:
    """Each backend's version, called once, with the seconds that took; one that fails is left out, and says why."""
    found, notes = {}, {}
    torch._dynamo.reset()
    for name in names:
        start = time.perf_counter()
        try:
            made = compiled(function, name)
            made(*inputs)
            torch.cuda.synchronize()
        except Exception as problem:
            notes[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
            continue
        found[name] = made
        notes[name] = round(time.perf_counter() - start, 2)
    return found, notes


# --- cases ------------------------------------------------------------------------------------------------------------


def random(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * w


def layer_norm_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    mean, rstd = x.float().mean(-1, keepdim=True), torch.rsqrt(x.float().var(-1, keepdim=True) + 1e-5)
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, w, w, [True, True, True])


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def batch_norm(a: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(a, None, None, training=True)


def kernel_cases(dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """Name, function, inputs, and the bytes that must be read and written. Where an input wants a gradient, a call is
    followed by the backward pass."""
    rows, columns = 32768 * scale, 1024
    x, y, w = random(rows, columns, dtype=dtype), random(rows, columns, dtype=dtype), random(columns, dtype=dtype)
    one = x.numel() * x.element_size()
    yield "add", lambda a, b: a + b, [x, y], 3 * one
    yield "chain of silu, tanh, gelu", lambda a, b: F.gelu(F.silu(a) * b.tanh()), [x, y], 3 * one
    yield "softmax", lambda a: a.softmax(-1), [x], 2 * one
    yield "layer norm", lambda a, b: F.layer_norm(a, a.shape[-1:], b, b), [x, w], 2 * one
    yield "layer norm, backward", layer_norm_backward, [x, w, y], 3 * one
    yield "RMS norm by hand", by_hand, [x, w], 2 * one
    yield "row sum", lambda a: a.sum(1), [x], one
    yield "column sum", lambda a: a.sum(0), [x], one
    yield "full sum", lambda a: a.sum(), [x], one
    yield "transpose + 1", lambda a: (a.t() + 1).contiguous(), [x], 2 * one
    yield "cat of two computed halves", lambda a, b: torch.cat([a + 1, b * 2], 1), [x, y], 4 * one
    yield "argmax over rows", lambda a: a.argmax(1), [x], one
    some = 8192 if scale == 1 else rows
    yield f"cumsum, {some} rows", lambda a: a.cumsum(1), [x[:some]], 2 * some * one // rows
    yield "cumsum, one row", lambda a: a.cumsum(0), [x.view(-1)], 2 * one
    yield f"softmax, {512 * scale} rows of 65536", lambda a: a.softmax(-1), [x.view(512 * scale, -1)], 2 * one
    places = torch.randint(0, rows, (rows,), device=DEVICE)
    yield "gather of rows, times 2", lambda a, i: a[i] * 2, [x, places], 2 * one
    thin = x.view(-1, 256)[:rows].contiguous()
    yield f"index_add of {rows} rows of 256", lambda a, i, b: a.index_add(0, i, b), [thin, places, thin], 3 * one // 4
    del thin
    wants_gradient = x.detach().requires_grad_()
    mask = x.numel()  # a byte for each element
    yield "dropout", lambda a: F.dropout(a, 0.1), [x], 2 * one
    yield "dropout, forward and backward", lambda a: F.dropout(a, 0.1), [wants_gradient], 4 * one + 2 * mask
    yield "gelu and dropout", lambda a: F.dropout(F.gelu(a), 0.1), [x], 2 * one
    yield (
        "gelu and dropout, forward and backward",
        lambda a: F.dropout(F.gelu(a), 0.1),
        [wants_gradient],
        5 * one + 2 * mask,
    )
    yield "128 rows times rand", lambda a: a * torch.rand_like(a[0]), [x.view(128, -1)], 2 * one
    del x, y, wants_gradient
    logits = random(4096, 50304, dtype=dtype)
    target = torch.randint(0, 50304, (4096,), device=DEVICE)
    yield "cross entropy, 4096 x 50304", cross_entropy, [logits, target], logits.numel() * logits.element_size()
    del logits
    images = random(64 * scale, 256, 56, 56, dtype=dtype)
    size = images.numel() * images.element_size()
    yield "batch norm, training", batch_norm, [images], 2 * size
    yield "pad + max pool", lambda a: F.max_pool2d(F.pad(a, (1, 1, 1, 1)), 3, 2), [images], size + size // 4
    a, b, bias = (random(*sizes, dtype=dtype) for sizes in ((8192, 4096), (4096, 4096), (4096,)))
    yield "linear + gelu", lambda a, b, c: F.gelu(F.linear(a, b, c)), [a, b, bias], 0


def chosen_cases(chosen: argparse.Namespace) -> Iterator[Case]:
    part, parts = map(int, chosen.part.split("/"))
    began, place = time.perf_counter(), 0
    for case in kernel_cases(getattr(torch, chosen.dtype), SIZES[chosen.size]):
        if chosen.only and not any(pattern in case[0] for pattern in chosen.only):
            continue
        if time.perf_counter() - began > chosen.seconds:
            return
        place += 1
        if place % parts == part:
            yield case


# --- measuring --------------------------------------------------------------------------------------------------------


class Clock:
    """Events around a call, after something that empties the cache of the GPU and takes longer than the host does."""

    def __init__(self) -> None:
        self.waste = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)

    def microseconds(self, function: Function, inputs: Sequence[Any], ahead: int = 1) -> float:
        """`ahead`: how often the cache is emptied: 130 microseconds each on an H200, in which the host has to have
        launched all of the call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(ahead):
            self.waste.zero_()
        start.record()
        function(*inputs)
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    def copy_bandwidth(self) -> float:
        """Bytes a second."""
        a, b = (torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        taken = [self.microseconds(lambda: b.copy_(a), ()) for _ in range(ROUNDS)]
        return 2 * a.numel() / median(taken) * 1e6


def with_backward(function: Function) -> Function:
    """A call and its backward pass. The gradient of the result is there beforehand, as that of a layer within a model
    is: of all ones, which is no other work."""
    gradients: list[torch.Tensor] = []

    def call(*inputs: torch.Tensor) -> None:
        result = function(*inputs)
        if not gradients:
            gradients.append(torch.ones_like(result))
        wanted = [each for each in inputs if each.requires_grad]
        torch.autograd.grad(result, wanted, gradients[0])

    return call


def kernels(chosen: argparse.Namespace) -> dict[str, Any]:
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for name, function, inputs, size in chosen_cases(chosen):
        found, notes = backends_for(function, inputs, chosen.backends)
        trains = any(each.requires_grad for each in inputs)
        calls = {backend: with_backward(made) if trains else made for backend, made in found.items()}
        row = {"case": name, "limit": round(size / bandwidth * 1e6, 1), "notes": notes}
        with torch.set_grad_enabled(trains):
            row |= times_of(clock, calls, inputs, 1 if chosen.compile_only else ROUNDS)
        if "ferrite" in row and size:
            row["of the limit"] = f"{row['limit'] / row['ferrite']:.0%}"
        rows.append(row)
        print(row, flush=True)
    return {"copy TB/s": round(bandwidth / 1e12, 2), "dtype": chosen.dtype, "size": chosen.size, "rows": rows}


def times_of(clock: Clock, calls: dict[str, Function], inputs: Sequence[Any], rounds: int) -> dict[str, float]:
    ahead = TRAINING_AHEAD if torch.is_grad_enabled() else 1
    taken: dict[str, list[float]] = {backend: [] for backend in calls}
    for made in calls.values():
        for _ in range(3):
            made(*inputs)
    for _ in range(rounds):
        for backend, made in calls.items():
            taken[backend].append(clock.microseconds(made, inputs, ahead))
    return {backend: round(median(numbers), 1) for backend, numbers in taken.items()}
