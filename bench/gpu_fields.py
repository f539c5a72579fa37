"""What fields of `GpuMachine` decide, each in programs of which it decides something, turn by turn in one process.

    python -m bench.gpu_fields [FIELD ..] [--rounds 9] [--seconds 300] [--part 0/2]

Microseconds on the GPU with the cache emptied before each call (`bench/gpu_variants.py`), for the value that the field
has and for others. Writes `gpu-fields.md`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_kernels import DEVICE, Case, Clock, layer_norm_backward
from bench.gpu_variants import measured

RESULT = Path(__file__).parent / "results" / "gpu-fields.md"
Program = Callable[..., Any]


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randint(-127, 127, sizes, device=DEVICE, dtype=torch.int8)


# --- programs ---------------------------------------------------------------------------------------------------------


def sums_both_ways(a: torch.Tensor) -> Any:
    return a.sum(0), a.sum(1)


def softmax(a: torch.Tensor) -> torch.Tensor:
    return a.softmax(-1)


def running_sum(a: torch.Tensor) -> torch.Tensor:
    return a.cumsum(-1)


def activations(a: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.silu(a) * a.tanh()).exp().sin()


def special(a: torch.Tensor) -> torch.Tensor:
    return torch.digamma(a.float()).to(a.dtype) + torch.erfinv(a) * torch.special.i1(a)


def part_plus_one(width: int) -> Program:
    return lambda a: a[:, :width] + 1


def max_pool(size: int, step: int) -> Program:
    return lambda a: F.max_pool2d(a, size, step)


def average_pool(size: int, step: int) -> Program:
    return lambda a: F.avg_pool2d(a, size, step)


def sum_of_last(a: torch.Tensor) -> torch.Tensor:
    return a.sum(-1)


def sum_of_middle(a: torch.Tensor) -> torch.Tensor:
    return a.sum(1)


def linear(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(a, weight)


def scaled_linear(a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(a, weight.to(a.dtype) * scale[:, None])


def learnt_norm(x: torch.Tensor, variance: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A number for each channel that elements need twice."""
    factor = (torch.rsqrt(variance + 1e-5) * weight)[:, None, None]
    return (x * factor + bias[:, None, None] * factor).relu()


def each_plus_one(*tensors: torch.Tensor) -> Any:
    return torch._foreach_add(list(tensors), 1.0)


def clipped(*tensors: torch.Tensor) -> Any:
    total = torch.stack(torch._foreach_norm(list(tensors))).norm()
    return torch._foreach_mul(list(tensors), 1 / (total + 1e-6))


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v)  # type: ignore[return-value]


def layer_norm_case(rows: int, columns: int) -> tuple[str, Program, list[Any]]:
    x, w, g = random(rows, columns), random(columns), random(rows, columns)
    return f"layer norm backward, {rows} x {columns}", layer_norm_backward, [x, w, g]


def programs(field: str) -> Iterator[tuple[str, Program, list[Any]]]:
    """Those that show what a field does."""
    if field == "one_program_points":
        for rows, columns in ((32, 128), (64, 256), (128, 512)):
            yield f"sums both ways, {rows} x {columns}", sums_both_ways, [random(rows, columns)]
    elif field == "max_held_elements":
        for rows, columns in ((16384, 1024), (8192, 4096), (4096, 8192)):
            yield layer_norm_case(rows, columns)
    elif field == "max_row_elements":
        for rows, columns in ((16384, 2048), (8192, 4096), (4096, 8192), (2048, 16384)):
            yield f"softmax, {rows} x {columns}", softmax, [random(rows, columns)]
    elif field == "max_flat_elements":
        yield "activations, 32768 x 1024", activations, [random(32768, 1024)]
        places = torch.randint(0, 32768, (32768,), device=DEVICE)
        yield "gather of rows of 1024", lambda a, i: a[i] * 2, [random(32768, 1024), places]
    elif field == "long_scan_elements":
        for rows, columns in ((1, 1 << 14), (1, 1 << 16), (8, 1 << 15), (8, 1 << 17)):
            yield f"cumsum, {rows} x {columns}", running_sum, [random(rows, columns)]
    elif field == "heavy_point_additions":
        yield "activations, 32768 x 1024", activations, [random(32768, 1024)]
        yield "digamma, erfinv and i1, 32768 x 1024", special, [torch.rand(32768, 1024, device=DEVICE)]
    elif field == "min_block_elements":
        for count in (1 << 14, 1 << 16, 1 << 18):
            yield f"activations of {count}", activations, [random(count)]
    elif field == "max_lanes_per_element":
        for width in (100, 90, 72):
            yield f"{width} columns of 128, plus 1", part_plus_one(width), [random(1 << 18, 128)]
    elif field == "max_written_along":
        for width in (4, 8, 16, 32):
            yield f"sum of rows of {width}", sum_of_last, [random((1 << 25) // width, width)]
    elif field == "max_written_across":
        for height in (8, 32, 64):
            yield f"sum of {height} rows of 256", sum_of_middle, [random((1 << 17) // height, height, 256)]
    elif field == "max_written_window":
        for size, step in ((3, 2), (5, 5), (7, 7)):
            yield f"max pool {size} x {size}, steps of {step}", max_pool(size, step), [random(64, 256, 56, 56)]
    elif field == "max_lane_step":
        for size, step in ((3, 2), (2, 2), (3, 3), (5, 5), (7, 7), (5, 1)):
            yield f"average pool {size} x {size}, steps of {step}", average_pool(size, step), [random(64, 256, 56, 56)]
            yield f"max pool {size} x {size}, steps of {step}", max_pool(size, step), [random(64, 256, 56, 56)]
    elif field == "min_split_elements":
        for count in (1 << 13, 1 << 15, 1 << 17, 1 << 19):
            yield f"sum of {count}", lambda a: a.sum(), [random(count)]
    elif field == "min_piece_summed":
        for rows, summed, columns in ((16, 1024, 1024), (4, 4096, 1024), (16, 8192, 256), (8, 2048, 512)):
            yield f"linear, {rows} x {summed} x {columns}", linear, [random(rows, summed), random(columns, summed)]
    elif field.startswith("max_factor"):
        for rows in (4, 16, 64, 128):
            weights = numbers(4096, 4096), random(4096)
            yield f"linear of 8-bit weights, {rows} rows", scaled_linear, [random(rows, 4096), *weights]
    elif field.startswith(("max_table", "min_table")):
        for sizes in ((64, 256, 28, 28), (8, 2048, 7, 7), (16, 4096, 1, 1), (2, 16384, 1, 1), (1, 65536, 2, 2)):
            ones = [random(sizes[1]).abs() for _ in range(3)]
            yield "learnt norm, {} x {} x {} x {}".format(*sizes), learnt_norm, [random(*sizes), *ones]
    elif field == "min_grouped_launches":
        for count in (2, 3, 4, 6, 12):
            tensors = [random(1000 + 1024 * place) for place in range(count)]
            yield f"{count} small tensors plus 1", each_plus_one, tensors
    elif field == "max_grouped_block":
        yield "64 tensors plus 1", each_plus_one, [random(1000 + 4096 * place) for place in range(64)]
    elif field == "max_bytes_between":
        yield "64 gradients clipped", clipped, [random(1024, 64 + 16 * place) for place in range(64)]
        yield "12 large gradients clipped", clipped, [random(4096, 4096) for _ in range(12)]
    elif field == "min_piece_keys":
        for batch, keys in ((1, 1024), (1, 4096), (1, 16384), (8, 4096)):
            heads = [random(batch, 8, size, 128) for size in (1, keys, keys)]
            yield f"decoding, {batch} x 8 heads, {keys} keys", decoded, heads


# Other values than a field has.
VALUES: dict[str, Sequence[float]] = {
    "one_program_points": (0, 1 << 11, 1 << 12, 1 << 13, 1 << 16),
    "max_held_elements": (1 << 10, 1 << 11, 1 << 13),
    "max_row_elements": (1024, 2048, 8192, 16384),
    "max_flat_elements": (512, 1024, 4096),
    "long_scan_elements": (1 << 12, 1 << 14, 1 << 17),
    "heavy_point_additions": (0, 75, 1000),
    "min_block_elements": (64, 256, 512),
    "max_lanes_per_element": (1.0, 1.5, 2.0),
    "max_written_along": (1, 2, 3, 4, 16),
    "max_written_across": (8, 16, 64),
    "max_written_window": (0, 32),
    "max_lane_step": (1, 2, 4),
    "min_split_elements": (1 << 12, 1 << 17, 1 << 19),
    "min_piece_summed": (64, 128, 256, 1024),
    "max_factor_readers": (8, 16, 256),
    "max_factor_loads": (1,),
    "max_factor_additions": (0,),
    "max_table_additions": (0, 8, 1000),
    "max_table_loads": (1,),
    "min_table_readers": (1, 4, 64),
    "min_grouped_launches": (2, 3, 6, 100),
    "max_grouped_block": (512, 2048, 16384),
    "max_bytes_between": (0, 1 << 16, 1 << 24),
    "min_piece_keys": (32, 64, 128, 512, 1024),
}


def variants(field: str) -> list[Mapping[str, Any]]:
    from ferrite.machines import gpu_machine

    attention = gpu_machine().attention
    if hasattr(attention, field):
        return [{"attention": replace(attention, **{field: int(value)})} for value in VALUES[field]]
    return [{field: value} for value in VALUES[field]]


def value_now(field: str) -> Any:
    from ferrite.machines import gpu_machine

    machine = gpu_machine()
    return getattr(machine if hasattr(machine, field) else machine.attention, field)


# --- measuring --------------------------------------------------------------------------------------------------------


def table(field: str, clock: Clock, bandwidth: float, rounds: int) -> list[str]:
    values = VALUES[field]
    lines = [
        f"| `{field}` | eager | {value_now(field)} (as it is) | " + " | ".join(map(str, values)) + " |",
        "|---|" + "--:|" * (2 + len(values)),
    ]
    for name, function, inputs in programs(field):
        case: Case = (name, function, inputs, sum(each.numel() * each.element_size() for each in inputs))
        row = measured(case, variants(field), clock, bandwidth, rounds)
        found = [value for key, value in row.items() if key not in ("case", "limit") and "error of" not in key]
        wrong = [key for key, value in row.items() if "error of" in key and float(value) > 0.05]
        lines.append(f"| {name} | " + " | ".join(map(str, found)) + " |" + (f" {wrong}" if wrong else ""))
        print(lines[-1], flush=True)
        torch._dynamo.reset()
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fields", nargs="*", metavar="FIELD", help="of the machine; all of them without any")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300, help="no new field is begun after so long")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="each N-th field, from the K-th on")
    parser.add_argument("--write", default=str(RESULT), metavar="FILE")
    chosen = parser.parse_args(argv)
    if unknown := sorted(set(chosen.fields) - set(VALUES)):
        parser.error(f"not measured here: {', '.join(unknown)}; there are {', '.join(VALUES)}")
    os.environ["FERRITE_CACHE"] = "0"
    torch._dynamo.config.cache_size_limit = 64
    clock, began = Clock(), time.perf_counter()
    bandwidth = clock.copy_bandwidth()
    place, parts = map(int, chosen.part.split("/"))
    text = [
        "# What fields of the machine decide\n",
        f"Command: `python -m bench.gpu_fields --rounds {chosen.rounds}`  ",
        f"Machine: {torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, medians\n",
    ]
    for field in (chosen.fields or list(VALUES))[place::parts]:
        if time.perf_counter() - began > chosen.seconds:
            print(f"no time for {field}", flush=True)
            continue
        print(f"# {field}", flush=True)
        text += [*table(field, clock, bandwidth, chosen.rounds), ""]
        Path(chosen.write).write_text("\n".join(text))


if __name__ == "__main__":
    main()
