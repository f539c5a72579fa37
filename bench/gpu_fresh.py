"""A model's step on a GPU, compiled in a process of its own (`python -m bench.gpu fresh`).

Each backend has empty caches the first time, and finds what it left there the second time. The step has run in eager
before, so that libraries are loaded. `first`: seconds of the first compiled step, in which all is compiled. `peak`: the
most memory that a later step needs beyond what is there before it, in MiB; `eager peak`: the same of eager, in the same
process. `misses`: questions to ferrite's cache that it had no answer to.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.backends import in_fresh_process
from bench.gpu_kernels import ANY_ROWS, DEVICE, DYNAMIC, kernels, median

STEPS_TIMED = 20


def one_process(request: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a fresh process."""
    from bench.gpu import model_cases, one_step

    warnings.simplefilter("ignore")
    make, make_inputs = model_cases()[request["model"]]
    dtype, training, backend = getattr(torch, request["dtype"]), request["training"], request["backend"]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).train(training)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in make_inputs().items()}
    eager = functools.partial(one_step, model, model, inputs, training)
    eager()
    answer: dict[str, Any] = {"eager peak": peak_of(eager)}
    start = time.perf_counter()
    run = torch.compile(model, backend=backend, dynamic=request.get("dynamic"))
    step = functools.partial(one_step, model, run, inputs, training)
    step()
    torch.cuda.synchronize()
    answer["first"] = round(time.perf_counter() - start, 2)
    for _ in range(2):
        step()
    answer["peak"] = peak_of(step)
    answer["step"] = round(1000 * median([seconds_of(step) for _ in range(STEPS_TIMED)]), 2)
    if backend == "ferrite":
        import ferrite

        asked = [each for record in ferrite.recent_compiles() for each in record.asked]
        answer["asked"], answer["misses"] = len(asked), sum(each.result != "hit" for each in asked)
    return answer


def peak_of(step: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def seconds_of(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def fresh(chosen: argparse.Namespace) -> dict[str, Any]:
    """A row for each model and direction: each backend cold, then warm."""
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name in chosen.only or ("bert", "resnet"):
        for training in (False, True):
            if training in chosen.without:
                continue
            row: dict[str, Any] = {"model": name + ", training" * training}
            for backend in chosen.backends:
                if backend == "eager" or time.perf_counter() - began > chosen.seconds:
                    continue
                request = {"model": name, "training": training, "dtype": chosen.dtype, "backend": backend}
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    cold = in_fresh_process("bench.gpu_fresh", request, Path(folder))
                    warm = in_fresh_process("bench.gpu_fresh", request, Path(folder))
                row[f"{backend}: cold, warm"] = [each.get("first", each) for each in (cold, warm)]
                row["eager peak"] = cold.get("eager peak")
                row[f"{backend} peak"] = cold.get("peak")
                if "misses" in warm:
                    row["warm: misses of questions"] = [warm["misses"], warm["asked"]]
                print({"backend": backend, "cold": cold, "warm": warm, **row}, flush=True)
            rows.append(row)
    return {"dtype": chosen.dtype, "rows": rows}


def dynamic(chosen: argparse.Namespace) -> dict[str, Any]:
    """Kernels for any sizes, and for any number of rows, beside those for the sizes at hand."""
    ways = {f"ferrite{DYNAMIC}": "any sizes", f"ferrite{ANY_ROWS}": "any rows"}
    chosen.backends = ["ferrite", *ways]
    result = kernels(chosen)
    for row in result["rows"]:
        row |= {f"{text} / known": round(row[way] / row["ferrite"], 2) for way, text in ways.items() if way in row}
    return result


if __name__ == "__main__":
    print(json.dumps(one_process(json.loads(sys.argv[1]))))
