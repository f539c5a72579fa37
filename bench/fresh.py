"""One model compiled in a process of its own: what the first call takes, and what ferrite recorded of it.

    python -m bench.fresh '{"model": "bert", "backend": "ferrite", "batch": 1, "dtype": "float32", "training": false}'

Prints one line of JSON. Started by `bench.models` and `bench.compile_time`, with caches that are empty, or warm from
such a process before.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from typing import Any

import torch

from bench.backends import OURS, given_to
from bench.records import mark, since
from bench.steps import call_of
from bench.zoo import find


def first_call(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of wrapping (imports), of the first call, and of the one after it; the most memory in mebibytes.
    `options`: ferrite's. With a report among them, also the seconds of writing it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(request.get("threads", 2))
    dtype, training = getattr(torch, request["dtype"]), request["training"]
    entry = find(request["model"])
    model = entry.ready(dtype, training)
    inputs = entry.inputs(request["batch"], dtype, training)
    before = mark()
    start = time.perf_counter()
    options = request.get("options", {})
    call = call_of(model, given_to(request["backend"], model, **options), inputs, training)
    seconds = {"wrap": time.perf_counter() - start}
    with torch.set_grad_enabled(training):
        for name in ("first", "second"):
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
    if "report" in options:
        import ferrite  # imports are part of what is measured above

        start = time.perf_counter()
        ferrite.report(options["report"])
        seconds["write"] = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "memory": memory, **(since(before) if request["backend"] == OURS else {})}


if __name__ == "__main__":
    print(json.dumps(first_call(json.loads(sys.argv[1]))))
