"""What the compiler costs around the work: time per call of tiny graphs, and time to import.

    python -m bench.overhead [--rounds N] [--no-inductor] [--write]

Each graph is compiled by ferrite, by Inductor, and by torch's aot_eager, which runs the same operators in eager through
the same AOTAutograd wrappers. All take turns in one process; ratios are taken round by round, below 1 is faster.

`inside` is the time inside the function that ferrite gave to AOTAutograd: what Dynamo's guards and AOTAutograd's
wrappers cost is not in it. `own` is that less the work itself. Kernels take nanoseconds on four elements and are not
subtracted; operators that the graph calls in eager are, each as it takes when called alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import ferrite.backend
from bench.backends import EAGER, OURS, backends, empty_caches, given_to, with_own_code
from bench.measure import interleaved, ratio
from bench.records import mark, since
from bench.report import in_markdown, parsed, parser_for, save, selected, show, watched

CAPTURE = "aot_eager"
Graph = tuple[Callable[..., Any], bool, bool]


def one_operator(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def ten_operators(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = x + 1
    return x


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


GRAPHS: dict[str, Graph] = {
    # name: (function, dynamic shapes, run backward too)
    "one operator": (one_operator, False, False),
    "one operator, dynamic": (one_operator, True, False),
    "ten operators": (ten_operators, False, False),
    "one operator, training step": (sine, False, True),
}


def bound(backend: str, graph: Graph) -> Callable[[], object]:
    """A call of the graph under a backend."""
    function, dynamic, backward = graph
    own = with_own_code(function)
    call = torch.compile(own, backend=backend, dynamic=True) if dynamic and backend != EAGER else given_to(backend, own)
    x = torch.ones(4, requires_grad=backward)
    if not backward:
        return lambda: call(x)
    seed = torch.ones(4)

    def step() -> None:
        x.grad = None
        call(x).backward(seed)

    return step


def inside(graph: Graph) -> tuple[Callable[[], object], Callable[[], object], dict[str, Any]]:
    """The function that ferrite makes of an inference graph, as AOTAutograd calls it; the work alone; its record."""
    function, dynamic, _ = graph
    made: list[Callable[[list[Any]], Any]] = []
    given: list[list[Any]] = []
    compile_graph = ferrite.backend.compile_graph

    def remember(captured: Any, compilation: Any) -> Any:
        result = compile_graph(captured, compilation)

        def watching(arguments: list[Any]) -> Any:
            given.append(list(arguments))
            return result(arguments)

        made.append(result)
        watching._boxed_call = True  # type: ignore[attr-defined]
        return watching

    before, x = mark(), torch.ones(4)
    with mock.patch.object(ferrite.backend, "compile_graph", remember), torch.no_grad():
        torch.compile(with_own_code(function), backend=OURS, dynamic=dynamic)(x)
    found, call, arguments = since(before), made[0], given[0]
    operators = found["eager_calls"]
    add = torch.ops.aten.add.Tensor

    def work() -> None:
        for _ in range(operators):
            add(x, 1)

    return (lambda: call(list(arguments))), work, found


def measured(name: str, names: Sequence[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """One row: microseconds per call of each backend, and of ferrite's own part."""
    graph = GRAPHS[name]
    torch.compiler.reset()
    seconds = interleaved({each: bound(each, graph) for each in names}, chosen.rounds, budget=chosen.seconds)
    row: dict[str, Any] = {"case": name, "microseconds": {n: statistics.median(t) * 1e6 for n, t in seconds.items()}}
    row["ratio"] = {other: ratio(seconds[OURS], seconds[other]) for other in names if other != OURS}
    if not graph[2]:
        torch.compiler.reset()
        call, work, found = inside(graph)
        parts = interleaved({"inside": call, "work": work}, chosen.rounds, budget=chosen.seconds)
        whole, done = (statistics.median(parts[part]) * 1e6 for part in ("inside", "work"))
        row |= {"inside": whole, "own": max(0.0, whole - (done if found["eager_calls"] else 0.0))}
        row |= {key: found[key] for key in ("kernels", "eager_calls", "failures")}
    return row


def cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    times = [f"{row['microseconds'][name]:.1f}" for name in names]
    ratios = ["{:.3f} ({:.3f} to {:.3f})".format(*row["ratio"][name]) for name in names if name not in (EAGER, OURS)]
    if "own" not in row:
        return [row["case"], *times, *ratios, "", "", ""]
    return [
        row["case"],
        *times,
        *ratios,
        f"{row['inside']:.1f}",
        f"{row['own']:.1f}",
        f"{row['kernels']}+{row['eager_calls']}",
    ]


def import_milliseconds(processes: int) -> float:
    code = "import time, torch; t = time.perf_counter(); import ferrite; print((time.perf_counter() - t) * 1e3)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(processes)]
    return statistics.median(float(run.stdout) for run in runs)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    ready = backends(not chosen.no_inductor)
    names = [EAGER, CAPTURE, *ready[1:]]
    graphs = selected(GRAPHS, str, chosen.only)
    with empty_caches():
        rows = [measured(name, names, chosen) for name in watched(graphs, str)]
    milliseconds = import_milliseconds(3 if chosen.quick else 7)
    others = [name for name in names if name not in (EAGER, OURS)]
    columns = ["graph", *(f"{name}, µs" for name in names), *(f"ferrite / {name} (quartiles)" for name in others)]
    columns += ["inside, µs", "own, µs", "kernels+calls"]
    table = [cells(row, names) for row in rows]
    lines = [f"`import ferrite` after `import torch`: {milliseconds:.0f} ms (median of fresh processes)"]
    show("Overhead per call", columns, table, lines)
    data = {"rows": rows, "import_milliseconds": milliseconds}
    if chosen.write:
        page = [*in_markdown(columns, table), "", *lines]
        save(chosen.write, "overhead", chosen, "Overhead per call, and of importing", page, data)
    return data


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    return run(parsed(parser_for(__doc__, rounds=200, seconds=1.0), argv))


if __name__ == "__main__":
    main()
