"""What the compiler costs around the work: time per call of tiny graphs, and time to import.

    python -m bench.overhead [--rounds N]

Each graph is compiled by ferrite and by torch's aot_eager, which runs the same operators in eager through the same
AOTAutograd wrappers: the difference is the host program. Eager and Inductor stand beside them for scale. The ratio is
taken round by round in one process.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import interleaved, ratio, write


def one_operator(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def ten_operators(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = x + 1
    return x


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


GRAPHS: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    # name: (function, dynamic shapes, run backward too)
    "one operator": (one_operator, False, False),
    "one operator, dynamic": (one_operator, True, False),
    "ten operators": (ten_operators, False, False),
    "one operator, training step": (sine, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    backends = ["eager", "aot_eager", "ferrite"] + (["inductor"] if shutil.which("g++") else [])
    lines = ["| graph | " + " | ".join(f"{b}, µs" for b in backends) + " | ferrite / aot_eager (quartiles) |"]
    lines.append("|---" * (len(backends) + 2) + "|")
    for name, (function, dynamic, backward) in GRAPHS.items():
        torch.compiler.reset()
        calls = {backend: bound(function, backend, dynamic, backward) for backend in backends}
        seconds = interleaved(calls, rounds)
        middle, low, high = ratio(seconds["ferrite"], seconds["aot_eager"])
        times = " | ".join(f"{statistics.median(seconds[b]) * 1e6:.1f}" for b in backends)
        lines.append(f"| {name} | {times} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
        print(lines[-1], flush=True)
    lines += ["", f"`import ferrite` after `import torch`: {import_milliseconds():.0f} ms (median of 7 processes)"]
    write("overhead", "Overhead per call, and of importing", lines)


def bound(function: Callable[..., Any], backend: str, dynamic: bool, backward: bool) -> Callable[[], object]:
    def own(*args: Any) -> Any:  # a code object each: Dynamo keeps compiled code per code object
        return function(*args)

    x = torch.ones(4, requires_grad=backward)
    if backend == "eager":
        call: Callable[..., Any] = own
    else:
        call = torch.compile(own, backend=backend, dynamic=dynamic or None)
    if not backward:
        return lambda: call(x)
    seed = torch.ones(4)

    def step() -> None:
        x.grad = None
        call(x).backward(seed)

    return step


def import_milliseconds() -> float:
    code = "import time, torch; t = time.perf_counter(); import ferrite; print((time.perf_counter() - t) * 1e3)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(7)]
    return statistics.median(float(run.stdout) for run in runs)


if __name__ == "__main__":
    main()
