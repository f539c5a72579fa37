"""Kernels under several machines: what a field of `GpuMachine` gives, turn by turn in one process.

    python -m bench.gpu_variants "column sum" --with piece_programs=16
        --with piece_programs=32,line_bytes=64

Each variant is the GPU at hand with some fields changed; the first is the GPU as it is. Results are compared with
double precision before anything is timed: the relative distance of all of them from it stands beside the microseconds,
those of eager as well. Without patterns and variants, those of `VARIANTS`. Microseconds as in `bench/gpu_kernels.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from bench.backends import with_own_code
from bench.gpu_kernels import SIZES, TRAINING_AHEAD, Case, Clock, Function, kernel_cases, median, with_backward

Fields = Mapping[str, Any]
# By a part of the name of a case, in the order in which they are worth knowing.
VARIANTS: dict[str, list[Fields]] = {
    "column sum": [
        {"max_block_rows": 16},
        {"max_block_rows": 16, "long_piece_programs": 128, "long_piece_elements": 8192},
        {"max_block_rows": 32},
        {"max_block_rows": 4, "long_piece_programs": 128, "long_piece_elements": 8192},
        {"max_block_rows": 16, "step_elements": 8192},
    ],
    "full sum": [{"row_elements": 8}],
    "layer norm, backward": [
        {"rows_under_way": 4},
        {"held_column_elements": 32},
        {"held_column_elements": 16},
        {"rows_under_way": 4, "held_column_elements": 16},
        {"held_column_elements": 16, "sector_bytes": 16},
        {"kept_column_elements": 16, "held_column_elements": 16},
        {"max_held_elements": 1024},
    ],
    "pad + max pool": [
        {"max_lane_step": 1},
        {"max_written_along": 4},
        {"max_written_across": 8},
    ],
    "batch norm, training": [{"max_table_additions": 0}],
    "chain of silu": [{"max_flat_elements": 1024}, {"max_flat_elements": 4096}],
    "softmax": [{"max_row_elements": 2048}, {"max_row_elements": 8192}],
    "cumsum, one row": [
        {"scan_piece_elements": 4096},
        {"scan_piece_elements": 8192, "row_elements": 32},
    ],
}
DRAWS = ("dropout", "rand")  # has no value in double precision to be compared with
MAX_CHECKED_BYTES = 4 << 30


def on_machine(function: Function, fields: Fields, inputs: Sequence[Any]) -> Function:
    """The function compiled for a GPU with other fields, and called once."""
    from ferrite.schedule.gpu import GpuScheduling
    from ferrite.targets.cuda import CUDA

    scheduling = CUDA.scheduling
    machine = replace(scheduling.machine, **fields)
    other = GpuScheduling(machine, scheduling.unsupported)
    made = torch.compile(with_own_code(function), backend="ferrite")
    lowering = mock.patch("ferrite.lower.ops.products.gpu_machine", return_value=machine)
    with mock.patch.dict(vars(CUDA), {"scheduling": other}), lowering:
        made(*inputs)
    torch.cuda.synchronize()
    return made


def distance(results: Any, exact: Any) -> float:
    """How far results are from exact ones, relative to these."""
    pairs = list(zip(pytree.tree_leaves(results), pytree.tree_leaves(exact), strict=True))
    away = [
        float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30)) for one, other in pairs
    ]
    return max(away)


def exact_results(name: str, function: Function, inputs: Sequence[Any]) -> Any:
    """The same in double precision; None where there is no such thing."""
    if any(word in name for word in DRAWS):
        return None
    try:
        return function(*(each.double() if each.is_floating_point() else each for each in inputs))
    except (RuntimeError, NotImplementedError):
        return None


def measured(case: Case, variants: Sequence[Fields], clock: Clock, bandwidth: float, rounds: int) -> dict[str, Any]:
    name, function, inputs, size = case
    row: dict[str, Any] = {"case": name, "limit": round(size / bandwidth * 1e6, 1)}
    trains = any(each.requires_grad for each in inputs)
    calls: dict[str, Function] = {"eager": function}
    with torch.set_grad_enabled(trains):
        for fields in ({}, *variants):
            text = ", ".join(f"{key}={value}" for key, value in fields.items()) or "as it is"
            try:
                calls[text] = on_machine(function, fields, inputs)
            except Exception as problem:
                row[text] = f"{type(problem).__name__}: {str(problem)[:100]}"
        exact = exact_results(name, function, inputs)
        if exact is not None:
            for text, call in calls.items():
                row[f"error of {text}"] = f"{distance(call(*inputs), exact):.2e}"
        del exact
        timed = {text: with_backward(call) if trains else call for text, call in calls.items()}
        taken: dict[str, list[float]] = {text: [] for text in timed}
        for _ in range(2):
            for call in timed.values():
                call(*inputs)
        for turn in range(rounds):
            for text, call in timed.items():
                if text != "eager" or turn < 5:
                    taken[text].append(clock.microseconds(call, inputs, TRAINING_AHEAD))
    return row | {text: round(median(each), 1) for text, each in taken.items()}


def chosen_cases(chosen: argparse.Namespace) -> Iterator[tuple[Case, Sequence[Fields]]]:
    given = [dict(parsed(each)) for each in chosen.fields]
    wanted = dict.fromkeys(chosen.patterns, given) if chosen.patterns else VARIANTS
    for case in kernel_cases(getattr(torch, chosen.dtype), SIZES[chosen.size]):
        for pattern, variants in wanted.items():
            if pattern in case[0]:
                yield case, variants
                break


def parsed(text: str) -> Iterator[tuple[str, Any]]:
    for item in text.split(","):
        key, _, value = item.partition("=")
        yield key, {"True": True, "False": False}.get(value) if value in ("True", "False") else int(value)


def report(row: Mapping[str, Any]) -> None:
    print(f"{row['case']}: limit {row['limit']}", flush=True)
    for text, value in row.items():
        if text in ("case", "limit") or text.startswith("error of "):
            continue
        part = f", {row['limit'] / value:.0%}" if isinstance(value, float) else ""
        print(f"    {value!s:>8}{part}  {row.get(f'error of {text}', '')}  {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="parts of names of cases")
    parser.add_argument("--with", dest="fields", action="append", default=[], metavar="FIELD=NUMBER,..")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300, help="no new case is begun after so long")
    chosen = parser.parse_args(argv)
    os.environ["FERRITE_CACHE"] = "0"
    torch._dynamo.config.cache_size_limit = 64
    clock, began = Clock(), time.perf_counter()
    bandwidth = clock.copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, {chosen.dtype}, {chosen.size}, copy {bandwidth / 1e12:.2f} TB/s", flush=True
    )
    for case, variants in chosen_cases(chosen):
        if time.perf_counter() - began > chosen.seconds:
            break
        report(measured(case, variants, clock, bandwidth, chosen.rounds))
        del case


if __name__ == "__main__":
    main()
