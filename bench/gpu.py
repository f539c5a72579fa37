"""Kernels, launches and models on a GPU: eager, Inductor and ferrite, turn by turn in one process.

    python -m bench.gpu [kernels] [launches] [models] [--dtype bfloat16] [--only PATTERN ..] [--seconds 60]

Kernels: microseconds on the GPU between two events, with the cache of the GPU emptied before each, medians; what a copy
of the same number of bytes takes, measured in the same run, is the limit. Launches: what a run of many small kernels
costs, on the host and until it is done. Models: milliseconds until done. Writes gpu-NAME.json and gpu-NAME.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

DEVICE = "cuda"
RESULTS = Path(__file__).parent / "results"
BACKENDS = ("eager", "inductor", "ferrite")
ROUNDS = 30
Function = Callable[..., Any]


def median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers) if numbers else float("nan")


def compiled(function: Function, backend: str) -> Function:
    if backend == "eager":
        return function
    return torch.compile(function, backend=backend)  # type: ignore[no-any-return]


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


# --- kernels ----------------------------------------------------------------------------------------------------------


def random(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * w


def layer_norm_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    mean, rstd = x.float().mean(-1, keepdim=True), torch.rsqrt(x.float().var(-1, keepdim=True) + 1e-5)
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, w, w, [True, True, True])


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple[str, Function, list[Any], int]]:
    """Name, function, inputs, and the bytes that must be read and written."""
    rows, columns = 32768, 1024
    x, y, w = random(rows, columns, dtype=dtype), random(rows, columns, dtype=dtype), random(columns, dtype=dtype)
    one = x.numel() * x.element_size()
    yield "add", lambda a, b: a + b, [x, y], 3 * one
    yield "chain of silu, tanh, gelu", lambda a, b: F.gelu(F.silu(a) * b.tanh()), [x, y], 3 * one
    yield "softmax", lambda a: a.softmax(-1), [x], 2 * one
    yield "layer norm", lambda a, b: F.layer_norm(a, (columns,), b, b), [x, w], 2 * one
    yield "layer norm, backward", layer_norm_backward, [x, w, y], 3 * one
    yield "RMS norm by hand", by_hand, [x, w], 2 * one
    yield "row sum", lambda a: a.sum(1), [x], one
    yield "column sum", lambda a: a.sum(0), [x], one
    yield "full sum", lambda a: a.sum(), [x], one
    yield "transpose + 1", lambda a: (a.t() + 1).contiguous(), [x], 2 * one
    yield "cat of two computed halves", lambda a, b: torch.cat([a + 1, b * 2], 1), [x, y], 4 * one
    yield "argmax over rows", lambda a: a.argmax(1), [x], one
    yield "cumsum, 8192 rows", lambda a: a.cumsum(1), [x[:8192]], one // 2
    yield "softmax, 512 rows of 65536", lambda a: a.softmax(-1), [x.view(512, -1)], 2 * one
    places = torch.randint(0, rows, (rows,), device=DEVICE)
    yield "gather of rows, times 2", lambda a, i: a[i] * 2, [x, places], 2 * one
    thin = x.view(-1, 256)[:rows].contiguous()
    yield "index_add of 32768 rows of 256", lambda a, i, b: a.index_add(0, i, b), [thin, places, thin], 3 * one // 4
    yield "dropout", lambda a: F.dropout(a, 0.1), [x], 2 * one
    logits = random(4096, 50304, dtype=dtype)
    target = torch.randint(0, 50304, (4096,), device=DEVICE)
    yield "cross entropy, 4096 x 50304", F.cross_entropy, [logits, target], logits.numel() * logits.element_size()
    images = random(64, 256, 56, 56, dtype=dtype)
    size = images.numel() * images.element_size()

    def batch_norm(a: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(a, None, None, training=True)

    yield "batch norm, training", batch_norm, [images], 2 * size
    yield "pad + max pool", lambda a: F.max_pool2d(F.pad(a, (1, 1, 1, 1)), 3, 2), [images], size + size // 4
    a, b, bias = (random(*sizes, dtype=dtype) for sizes in ((8192, 4096), (4096, 4096), (4096,)))
    yield "linear + gelu", lambda a, b, c: F.gelu(F.linear(a, b, c)), [a, b, bias], 0


class Clock:
    """Events around a call, after something that empties the cache of the GPU and takes longer than the host does."""

    def __init__(self) -> None:
        self.waste = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)

    def microseconds(self, function: Function, inputs: Sequence[Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def kernels(chosen: argparse.Namespace) -> dict[str, Any]:
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name, function, inputs, size in kernel_cases(getattr(torch, chosen.dtype)):
        if chosen.only and not any(pattern in name for pattern in chosen.only):
            continue
        if time.perf_counter() - began > chosen.seconds:
            break
        found, notes = backends_for(function, inputs, chosen.backends)
        with torch.no_grad():
            for made in found.values():
                for _ in range(3):
                    made(*inputs)
            taken: dict[str, list[float]] = {backend: [] for backend in found}
            for _ in range(ROUNDS):
                for backend, made in found.items():
                    taken[backend].append(clock.microseconds(made, inputs))
        row = {"case": name, "limit": round(size / bandwidth * 1e6, 1), "notes": notes}
        row |= {backend: round(median(numbers), 1) for backend, numbers in taken.items()}
        rows.append(row)
        print(row, flush=True)
    return {"copy TB/s": round(bandwidth / 1e12, 2), "dtype": chosen.dtype, "rows": rows}


# --- launches ---------------------------------------------------------------------------------------------------------


def host_and_total(function: Callable[[], Any], count: int = 100) -> tuple[float, float]:
    """Microseconds of a call: until Python goes on, and until the GPU is done."""
    for _ in range(10):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        function()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return (host - start) / count * 1e6, (time.perf_counter() - start) / count * 1e6


def launches(chosen: argparse.Namespace) -> dict[str, Any]:
    """Independent small kernels, of different sizes so that none becomes part of another."""
    rows = []
    for count in (1, 2, 3, 4, 8, 16, 32, 100):
        given = [torch.randn(1024 + 64 * place, device=DEVICE) for place in range(count)]

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [tensor.cos() for tensor in tensors]

        row: dict[str, Any] = {"launches": count}
        for mode, least in (("ferrite, one by one", 1 << 30), ("ferrite, a graph", 1)):
            row[mode] = with_graphs_from(least, function, given)
        for backend in chosen.backends:
            if backend != "ferrite" and (backend == "eager" or count <= 32):
                found, notes = backends_for(function, given, (backend,))
                row[backend] = found and [round(n, 1) for n in host_and_total(lambda: found[backend](*given))]  # noqa: B023
                row["notes"] = notes
        rows.append(row)
        print(row, flush=True)
    return {"rows": rows}


def with_graphs_from(least: int, function: Function, given: Sequence[Any]) -> Any:
    from ferrite.runtime.cuda import runs

    kept, runs.MIN_GRAPH_LAUNCHES = runs.MIN_GRAPH_LAUNCHES, least
    try:
        found, notes = backends_for(function, given, ("ferrite",))
        if not found:
            return notes
        return [round(number, 1) for number in host_and_total(lambda: found["ferrite"](*given))]
    finally:
        runs.MIN_GRAPH_LAUNCHES = kept


# --- models -----------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer of a transformer, as people write one."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.up, self.down, self.heads = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, places, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, places, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


def residual(channels: int) -> torch.nn.Module:
    layers = [torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False), torch.nn.BatchNorm2d(channels)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), *(type(layers[0])(channels, channels, 1),))


def model_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], torch.nn.Module], list[Any]]]:
    yield (
        "transformer, 6 layers",
        lambda: torch.nn.Sequential(*(Block() for _ in range(6))),
        [random(8, 256, 768, dtype=dtype)],
    )
    yield (
        "transformer, 2 small layers",
        lambda: torch.nn.Sequential(*(Block(128, 4) for _ in range(2))),
        [random(2, 64, 128, dtype=dtype)],
    )
    yield (
        "convolutions, 4 layers",
        lambda: torch.nn.Sequential(*(residual(64) for _ in range(4))),
        [random(32, 64, 56, 56, dtype=dtype)],
    )


def models(chosen: argparse.Namespace) -> dict[str, Any]:
    rows = []
    dtype = getattr(torch, chosen.dtype)
    for name, make, inputs in model_cases(dtype):
        for training in (False, True):
            model = make().to(DEVICE, dtype).train(training)

            def step(x: torch.Tensor, model: Any = model, training: bool = training) -> Any:
                with torch.set_grad_enabled(training):
                    result = model(x)
                if training:
                    result.float().square().mean().backward()
                    model.zero_grad(set_to_none=True)
                return result

            found, notes = {}, {}
            torch._dynamo.reset()
            for backend in chosen.backends:
                start = time.perf_counter()
                try:
                    made = compiled(model, backend)
                    step(*inputs, model=made)
                    torch.cuda.synchronize()
                except Exception as problem:
                    notes[backend] = f"{type(problem).__name__}: {str(problem)[:200]}"
                    continue
                found[backend], notes[backend] = made, round(time.perf_counter() - start, 2)
            taken: dict[str, list[float]] = {backend: [] for backend in found}
            for turn in range(ROUNDS + 3):
                for backend, made in found.items():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    step(*inputs, model=made)
                    torch.cuda.synchronize()
                    if turn >= 3:
                        taken[backend].append(time.perf_counter() - start)
            row: dict[str, Any] = {"model": name, "training": training, "notes": notes}
            row |= {backend: round(1000 * median(numbers), 3) for backend, numbers in taken.items()}
            rows.append(row)
            print(row, flush=True)
    return {"dtype": chosen.dtype, "rows": rows}


# --- pages ------------------------------------------------------------------------------------------------------------


def page(name: str, result: dict[str, Any]) -> str:
    """The rows as a table; what compiling took, or why it failed, behind them."""
    rows = result["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "notes"))
    lines = [f"# {name.capitalize()} on a GPU", "", f"Command: `python -m bench.gpu {name}`  ", f"Machine: {machine()}"]
    facts = [f"{key}: {value}" for key, value in result.items() if key != "rows"]
    lines += ["", ", ".join(facts), ""] if facts else [""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(text(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def text(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["kernels", "launches", "models"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=600, help="no new kernel is begun after so long")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--write", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    torch.manual_seed(0)
    for name in chosen.what:
        result = {"kernels": kernels, "launches": launches, "models": models}[name](chosen)
        chosen.write.mkdir(parents=True, exist_ok=True)
        (chosen.write / f"gpu-{name}.json").write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
        (chosen.write / f"gpu-{name}.md").write_text(page(name, result))


if __name__ == "__main__":
    main()
