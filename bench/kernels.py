"""Kernels as models have them: eager, ferrite and Inductor side by side in one process, turn by turn.

    python -m bench.kernels [--only softmax norm] [--quick] [--no-inductor] [--write]

Every case is first compared with eager; what is wrong is reported as wrong and not timed. Speeds are medians of the
ratio round by round, above 1 is faster. Float32 unless the name says otherwise. `captured` is eager behind
torch.compile: guards and wrappers cost tens of microseconds a call whatever the backend, more than a small kernel.

Cases that draw random numbers are compiled with `rng="counter"`: Inductor does not keep eager's stream either.

Large cases move at least 64 MB, huge ones (`--size huge`) four times as much along their first dimension, and their
bandwidth is given: the bytes that must move (inputs read once, outputs written once; with gradients the inputs read
twice) by the median time, as a share of that of a copy in the same run. There are three such shares. `of copy`: of
`y.copy_(x)` with both in memory that is there already, counted as a read and a write. `of clone`: of `x.clone()`, whose
result is fresh memory, as the results of compiled functions are. `of reading`: of `x.sum()`, which writes nothing: many
machines write while they read, so that reading moves fewer bytes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.agreement import disagreement
from bench.backends import CAPTURED, EAGER, INDUCTOR, OURS, backends, empty_caches, given_to, reason, with_own_code
from bench.cases import CASES, Case, tensors_of
from bench.cases.case import LARGE, leaves_of
from bench.measure import interleaved, others_share, ratio
from bench.records import mark, since
from bench.report import in_markdown, one_by_one, parsed, parser_for, save, selected, show, summary_lines, summary_of
from tests.compare import upcast_tree

# One of each kind, for a short look.
QUICK: tuple[str, ...] = ("chain-long", "gelu", "adam", "rope", "softmax", "layer-norm", "rms-norm-backward")
QUICK += (
    "batch-norm",
    "cross-entropy-backward",
    "sum-columns",
    "var-rows",
    "transpose",
    "nchw-to-nhwc",
    "cat-columns",
    "embedding",
)
Sized = tuple[Case, str]
PAIRS = ((OURS, EAGER), (OURS, CAPTURED), (OURS, INDUCTOR), (INDUCTOR, EAGER))


def label(item: Sized) -> str:
    return f"{item[0].name}/{item[1]}"


def inputs_of(case: Case, size: str) -> list[Any]:
    torch.manual_seed(0)
    return case.make(*case.sizes()[size])


def call_of(case: Case, function: Callable[..., Any], inputs: list[Any], seeds: list[Any]) -> Callable[[], Any]:
    """One call; with gradients for given gradients of the outputs, where the case is about them."""
    if not case.backward:
        return lambda: function(*inputs)
    leaves = leaves_of(inputs)

    def step() -> Any:
        outputs = function(*inputs)
        return outputs, torch.autograd.grad(tensors_of(outputs), leaves, seeds)

    return step


def observed(case: Case, function: Callable[..., Any], inputs: list[Any], seeds: list[Any]) -> Any:
    """All that one call computes, what it writes into its inputs included."""
    torch.manual_seed(1)
    results = call_of(case, function, inputs, seeds)()
    return {"results": results, "inputs": inputs}


def seeds_of(case: Case, inputs: list[Any]) -> list[torch.Tensor]:
    """Gradients of the outputs, to begin with."""
    if not case.backward:
        return []
    torch.manual_seed(2)
    return [torch.randn_like(output) for output in tensors_of(case.function(*copy.deepcopy(inputs)))]


def measured(
    item: Sized,
    names: Sequence[str],
    copies: dict[str, float],
    rounds: int,
    seconds: float,
    dynamic: bool = False,
) -> dict[str, Any]:
    """One row: seconds, compile seconds and complaints per backend."""
    case, size = item
    torch.compiler.reset()
    with torch.set_grad_enabled(case.backward):
        seeds = seeds_of(case, inputs_of(case, size))
        eager = observed(case, case.function, inputs_of(case, size), seeds)
        exact = None
        if case.exact:
            exact = observed(case, case.function, upcast_tree(inputs_of(case, size)), upcast_tree(seeds))
        row: dict[str, Any] = {"case": case.name, "group": case.group, "size": size, "shape": case.sizes()[size]}
        outputs = tensors_of(eager["results"][0] if case.backward else eager["results"])
        row |= {"bytes": case.traffic(eager["inputs"], outputs), "compile": {}, "problems": {}, "seconds": {}}
        calls = {EAGER: call_of(case, case.function, inputs_of(case, size), seeds)}
        for name in (*names[1:], CAPTURED):
            function = compiled(row, case, name, inputs_of(case, size), seeds, eager, exact, dynamic)
            if function is not None:
                calls[name] = call_of(case, function, inputs_of(case, size), seeds)
        del eager, exact, outputs
        found, row["others"] = others_share(functools.partial(interleaved, calls, rounds, budget=seconds))
    for name, times in found.items():
        row["seconds"][name] = {"median": statistics.median(times), "best": min(times), "rounds": len(times)}
    row["speed"] = {
        f"{ours} to {theirs}": ratio(found[theirs], found[ours])[0]
        for ours, theirs in PAIRS
        if ours in found and theirs in found
    }
    if row["bytes"] >= LARGE:
        row["share"] = {
            name: {way: row["bytes"] / row["seconds"][name]["median"] / speed for way, speed in copies.items()}
            for name in found
        }
    return row


def compiled(
    row: dict[str, Any],
    case: Case,
    name: str,
    inputs: list[Any],
    seeds: list[Any],
    eager: Any,
    exact: Any,
    dynamic: bool,
) -> Callable[..., Any] | None:
    """The function compiled and checked; None if that failed, and then the row says why."""
    options = {"rng": "counter"} if case.random else {}
    function = given_to(name, with_own_code(case.function), dynamic, **options)
    before = mark()
    start = time.perf_counter()
    try:
        results = observed(case, function, inputs, seeds)
    except Exception as failure:
        row["problems"][name] = f"failed: {reason(failure)}"
        return None
    row["compile"][name] = time.perf_counter() - start
    if name == OURS:
        found = since(before)
        row |= {name: found[name] for name in ("kernels", "eager_calls")}
        if found["failures"]:
            row["problems"][name] = f"failed: {found['failures'][0]}"
            return None
    if case.random and name != CAPTURED:
        return function  # its random numbers are its own
    problem = disagreement(name, results, eager, exact, case.terms)
    if problem is not None:
        row["problems"][name] = f"wrong: {problem}"
        return None
    return function


def copy_speeds(rounds: int, seconds: float) -> dict[str, float]:
    """Bytes per second of copying 64 MB, into memory that is there and into fresh memory, and of only reading it."""
    source, target = torch.ones(LARGE // 4), torch.ones(LARGE // 4)
    ways = {"copy": lambda: target.copy_(source), "clone": source.clone, "reading": source.sum}
    found = interleaved(ways, rounds, budget=seconds)
    moved = {"copy": 2 * LARGE, "clone": 2 * LARGE, "reading": LARGE}
    return {name: moved[name] / statistics.median(times) for name, times in found.items()}


COLUMNS: tuple[str, ...] = ("case", "size", "MB", "eager, µs", "ferrite, µs", "inductor, µs", "ferrite × eager")
COLUMNS += (
    "ferrite × captured",
    "ferrite × inductor",
    "inductor × eager",
    "GB/s",
    "of copy",
    "of clone",
    "of reading",
    "compile, s",
    "inductor, s",
)
COLUMNS += ("kernels+calls", "")


def cells(row: dict[str, Any]) -> list[str]:
    def seconds(name: str) -> str:
        return f"{row['seconds'][name]['median'] * 1e6:.1f}" if name in row["seconds"] else "-"

    def speed(name: str) -> str:
        return f"{row['speed'][name]:.2f}" if name in row["speed"] else "-"

    share = row.get("share", {}).get(OURS)
    bandwidth = [""] * 4
    if share is not None:
        rate = row["bytes"] / row["seconds"][OURS]["median"] / 1e9
        bandwidth = [f"{rate:.1f}", *(f"{share[way]:.2f}" for way in ("copy", "clone", "reading"))]
    compile_times = [f"{row['compile'][name]:.2f}" if name in row["compile"] else "-" for name in (OURS, INDUCTOR)]
    made = f"{row['kernels']}+{row['eager_calls']}" if "kernels" in row else "-"
    problems = "; ".join(f"{name} {problem}" for name, problem in row["problems"].items())
    return [
        row["case"],
        row["size"],
        f"{row['bytes'] / 1e6:.3g}",
        *map(seconds, (EAGER, OURS, INDUCTOR)),
        *(speed(f"{ours} to {theirs}") for ours, theirs in PAIRS),
        *bandwidth,
        *compile_times,
        made,
        problems,
    ]


def line_of(row: dict[str, Any]) -> str:
    speeds = ", ".join(f"{pair} {speed:.2f}" for pair, speed in row["speed"].items())
    share = "".join(f", {way} {part:.2f}" for way, part in row.get("share", {}).get(OURS, {}).items())
    return f"{row['case']}/{row['size']}: {speeds}{share} {row['problems'] or ''}"


def summarised(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Figures and sentences over all rows, and over those of each size."""
    figures: dict[str, Any] = {}
    lines: list[str] = []
    for size in dict.fromkeys(row["size"] for row in rows):
        for pair in (f"{ours} to {theirs}" for ours, theirs in PAIRS):
            speeds = {row["case"]: row["speed"][pair] for row in rows if row["size"] == size and pair in row["speed"]}
            figures[f"{pair}, {size}"] = summary_of(speeds)
            lines += summary_lines(f"{pair}, {size}", figures[f"{pair}, {size}"])
    wrong = [f"{row['case']}/{row['size']} {name}" for row in rows for name in row["problems"]]
    lines += [f"Not timed, wrong or failed: {', '.join(wrong)}."] if wrong else []
    figures["wrong"] = wrong
    return figures, lines


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for, show it, and write it if that was asked for."""
    items = [(case, size) for case in CASES for size in case.sizes() if size in chosen.size]
    if chosen.quick and not chosen.only:
        items = [item for item in items if item[0].name in QUICK]
    items = selected(items, label, chosen.only)
    names = backends(not chosen.no_inductor)
    with empty_caches():
        prepared(names)
        copies = copy_speeds(chosen.rounds, chosen.seconds)
        rows = one_by_one(
            items,
            label,
            lambda item: measured(item, names, copies, chosen.rounds, chosen.seconds, chosen.dynamic),
            line_of,
        )
    figures, lines = summarised(rows)
    rates = ", ".join(f"{way} {speed / 1e9:.1f} GB/s" for way, speed in copies.items())
    busy = max(row["others"] for row in rows)
    lines.append(f"64 MB: {rates}. Other processes had at most {busy:.0%} of the machine during a case.")
    table = [cells(row) for row in rows]
    show("Kernels", COLUMNS, table, lines)
    data = {"copy_bytes_per_second": copies, "rows": rows, "summary": figures}
    if chosen.write:
        page = [f"{line}  " for line in lines]
        save(chosen.write, "kernels", chosen, "Kernels", [*page, "", *in_markdown(COLUMNS, table)], data)
    return data


def prepared(names: Sequence[str]) -> None:
    """Let each compiler do what it does once per process: that is not to be the first case's."""
    torch.compiler.reset()
    for name in names[1:]:
        given_to(name, with_own_code(first_of_all))(torch.ones(4))


def first_of_all(x: torch.Tensor) -> torch.Tensor:
    return x.sum() + 1


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__, rounds=20, seconds=1.0)
    parser.add_argument(
        "--size",
        nargs="+",
        choices=["small", "large", "huge"],
        default=["small", "large"],
        help="only cases of this size (small and large)",
    )
    parser.add_argument("--dynamic", action="store_true", help="compile for sizes that are known at run time")
    return run(parsed(parser, argv))


if __name__ == "__main__":
    main()
