"""Whole models with random weights: eager, ferrite and Inductor side by side in one process, turn by turn.

    python -m bench.models [--filter resnet bert] [--quick] [--no-inductor] [--write]
    python -m bench.models --compile-only --no-inductor

Every model runs in inference and as a training step (forward, loss, backward; no optimizer), with batch 1 and a larger
one, in float32 and, where the processor computes in it, bfloat16. It is first compared with eager and a float64 run,
where that says wrong with eager's errors at weights and inputs that are rounded otherwise, too; what is wrong is
reported as wrong and not timed. Speeds are medians of the ratio round by round, above 1 is faster.

Cold compile: seconds from the first call to its result, in a fresh process with empty caches for each backend.
`capture` is the same for `aot_eager`, which captures and differentiates but compiles nothing: what a compiler takes
beyond it is its own. Peak memory: of one call, beyond what is held before it (see `bench.memory`).
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.agreement import disagreement_of_models
from bench.backends import EAGER, INDUCTOR, OURS, backends, empty_caches, given_to, in_fresh_process, reason
from bench.measure import interleaved, others_share, ratio
from bench.memory import peak_bytes
from bench.records import mark, since
from bench.report import in_markdown, one_by_one, parsed, parser_for, save, selected, show, summary_lines, summary_of
from bench.steps import call_of, observed
from bench.zoo import MODELS, Model
from tests.models.exact import in_float64
from tests.rounding import DRAWS, nudged

CAPTURE = "aot_eager"
QUICK = ("mobilenet-v2", "bert", "llama")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = (f"{OURS} to {EAGER}", f"{OURS} to {INDUCTOR}", f"{INDUCTOR} to {EAGER}")


@dataclass(frozen=True)
class Setting:
    """One way to run a model."""

    model: Model
    batch: int
    dtype: str
    training: bool

    def __str__(self) -> str:
        return f"{self.model.name}/{self.batch}/{self.dtype}/{'training' if self.training else 'inference'}"


def settings_of(chosen: argparse.Namespace) -> list[Setting]:
    models = [MODELS[name] for name in QUICK] if chosen.quick and not chosen.only else list(MODELS.values())
    found = [
        Setting(model, batch, dtype, kind == "training")
        for model in models
        for kind, dtype in itertools.product(chosen.kinds, chosen.dtypes)
        for batch in (model.smaller, model.larger)[: 1 if chosen.quick else 2]
        if batch in (chosen.batches or (batch,))
    ]
    return selected(found, str, chosen.only)


def cold_compiles(setting: Setting, names: Sequence[str], threads: int) -> dict[str, Any]:
    """The first call under each backend, each in a fresh process with empty caches."""
    found = {}
    for name in (CAPTURE, *names[1:]):
        request = {"model": setting.model.name, "backend": name, "batch": setting.batch, "training": setting.training}
        request |= {"dtype": str(DTYPES[setting.dtype]).removeprefix("torch."), "threads": threads}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found[name] = in_fresh_process("bench.fresh", request, Path(folder))
    return found


def measured(setting: Setting, names: Sequence[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """One row: seconds, peak bytes, cold compiles and complaints per backend."""
    row: dict[str, Any] = {"case": str(setting), "model": setting.model.name, "family": setting.model.family}
    row |= {"batch": setting.batch, "dtype": setting.dtype, "training": setting.training}
    row |= {"seconds": {}, "speed": {}, "peak": {}, "problems": {}, "cold": {}, "others": 0.0}
    if not chosen.no_cold:
        row["cold"] = cold_compiles(setting, names, chosen.threads)
    if not chosen.compile_only:
        with torch.set_grad_enabled(setting.training), empty_caches():
            side_by_side(row, setting, names, chosen)
    return row


def side_by_side(row: dict[str, Any], setting: Setting, names: Sequence[str], chosen: argparse.Namespace) -> None:
    torch.compiler.reset()
    dtype, training = DTYPES[setting.dtype], setting.training
    model, inputs = (
        setting.model.ready(dtype, training),
        setting.model.inputs(setting.batch, dtype, training),
    )
    state = copy.deepcopy(model.state_dict())
    start = time.perf_counter()
    eager = observed(model, model, inputs, training)
    if (taken := time.perf_counter() - start) > chosen.longest:
        row["problems"][EAGER] = f"left out: takes {taken:.0f} s"
        return
    exact = exact_run(setting.model.ready(dtype, training), inputs, training)
    calls = {EAGER: call_of(model, model, inputs, training)}
    for name in names[1:]:
        model.load_state_dict(state)
        compiled = given_to(name, model)
        problem = problem_of(name, setting, model, compiled, inputs, eager, exact)
        if problem is not None:
            row["problems"][name] = problem
        else:
            calls[name] = call_of(model, compiled, inputs, training)
    del eager, exact
    times, row["others"] = others_share(functools.partial(interleaved, calls, chosen.rounds, budget=chosen.seconds))
    for name, values in times.items():
        row["seconds"][name] = {"median": statistics.median(values), "best": min(values), "rounds": len(values)}
        model.zero_grad(set_to_none=True)
        row["peak"][name] = peak_bytes(cleared(model, calls[name]))
    row["speed"] = {
        pair: ratio(times[theirs], times[ours])[0]
        for pair in PAIRS
        for ours, theirs in [pair.split(" to ")]
        if ours in times and theirs in times
    }


def problem_of(
    name: str,
    setting: Setting,
    model: torch.nn.Module,
    compiled: Callable[..., Any],
    inputs: dict[str, Any],
    eager: Any,
    exact: Any,
) -> str | None:
    """Why a compiled model is not to be timed: it failed, or is wrong."""
    before = mark()
    try:
        found = observed(model, compiled, inputs, setting.training)
    except Exception as failure:
        return f"failed: {reason(failure)}"
    if name == OURS and (failures := since(before)["failures"]):
        return f"failed: {failures[0]}"
    if name != OURS and setting.training and has_dropout(model):
        return None  # its random numbers are its own
    problem = disagreement_of_models(name, found, eager, exact)
    if problem is not None:
        problem = disagreement_of_models(name, found, eager, exact, nudged_runs(setting, inputs))
    return None if problem is None else f"wrong: {problem}"


def cleared(model: torch.nn.Module, call: Any) -> Any:
    """A call after which no gradient is left: the next one begins as the first."""

    def step() -> None:
        call()
        model.zero_grad(set_to_none=True)

    return step


def exact_run(model: torch.nn.Module, inputs: dict[str, Any], training: bool) -> Any:
    """The same weights, inputs and random numbers in float64; the model stays there."""
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    model = model.double()
    with in_float64():
        return observed(model, model, wide, training)


def nudged_runs(setting: Setting, inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """What eager and float64 compute where each weight and input is rounded another way, a few times."""
    runs, training = [], setting.training
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        model = setting.model.ready(DTYPES[setting.dtype], training)
        for state in (*model.parameters(), *model.buffers()):
            nudged(state.detach(), generator)
        given = {
            name: nudged(value.clone(), generator) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        reference = copy.deepcopy(model)
        runs.append((observed(model, model, given, training), exact_run(reference, given, training)))
    return runs


def has_dropout(model: torch.nn.Module) -> bool:
    rates = (value for name, value in vars(model.config).items() if "drop" in name)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


COLUMNS: tuple[str, ...] = ("model", "eager, ms", "ferrite, ms", "inductor, ms", "ferrite × eager")
COLUMNS += ("ferrite × inductor", "inductor × eager", "eager, MB", "ferrite, MB", "inductor, MB")
COLUMNS += ("capture, s", "ferrite, s", "inductor, s", "")


def cells(row: dict[str, Any]) -> list[str]:
    def cold(name: str) -> str:
        answer = row["cold"].get(name)
        return "-" if answer is None else "failed" if "failed" in answer else f"{answer['seconds']['first']:.1f}"

    columns = (EAGER, OURS, INDUCTOR)
    return [
        row["case"],
        *(f"{row['seconds'][n]['median'] * 1e3:.1f}" if n in row["seconds"] else "-" for n in columns),
        *(f"{row['speed'][pair]:.2f}" if pair in row["speed"] else "-" for pair in PAIRS),
        *(f"{row['peak'][n] / 1e6:.1f}" if n in row["peak"] else "-" for n in columns),
        *map(cold, (CAPTURE, OURS, INDUCTOR)),
        "; ".join(f"{name} {problem}" for name, problem in row["problems"].items()),
    ]


def line_of(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells(row), strict=True) if cell not in ("", "-"))


def summarised(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    figures: dict[str, Any] = {}
    lines: list[str] = []
    for pair in PAIRS:
        figures[pair] = summary_of({row["case"]: row["speed"][pair] for row in rows if pair in row["speed"]})
        lines += summary_lines(pair, figures[pair])
    peaks = {
        row["case"]: row["peak"][OURS] / row["peak"][EAGER]
        for row in rows
        if OURS in row["peak"] and row["peak"][EAGER]
    }
    over = {case: round(share, 3) for case, share in peaks.items() if share > 1}
    figures["peak above eager's"] = over
    if over:
        lines.append(f"More memory than eager: {', '.join(f'{case} {share:.2f}' for case, share in over.items())}.")
    shares = own_shares(rows)
    figures["own share of cold compile, seconds"] = shares
    for name, values in shares.items():
        middle = statistics.median(values.values())
        lines.append(f"Cold compile beyond capture, {name}: {middle:.2f} s in the median of {len(values)}.")
    if OURS in shares and INDUCTOR in shares:
        parts = {case: mine / shares[INDUCTOR][case] for case, mine in shares[OURS].items() if case in shares[INDUCTOR]}
        told = ", ".join(f"{case} {part:.2f}" for case, part in sorted(parts.items(), key=lambda pair: -pair[1]))
        lines.append(f"ferrite beyond capture, as a share of Inductor's beyond capture: {told}.")
    figures["wrong"] = [f"{row['case']} {name}" for row in rows for name in row["problems"]]
    return figures, lines


def own_shares(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of the first call beyond those of capturing alone, by compiler and case."""
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        first = {name: found["seconds"]["first"] for name, found in row["cold"].items() if "seconds" in found}
        for name in (OURS, INDUCTOR):
            if name in first and CAPTURE in first:
                shares.setdefault(name, {})[row["case"]] = round(first[name] - first[CAPTURE], 3)
    return shares


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    warnings.filterwarnings("ignore", category=UserWarning)
    names = backends(not chosen.no_inductor)
    settings = settings_of(chosen)
    rows = one_by_one(settings, str, lambda setting: measured(setting, names, chosen), line_of)
    figures, lines = summarised(rows)
    lines.append(f"Other processes had at most {max(row['others'] for row in rows):.0%} of the machine during a case.")
    table = [cells(row) for row in rows]
    show("Models", COLUMNS, table, lines)
    data = {"rows": rows, "summary": figures}
    if chosen.write:
        page = [f"{line}  " for line in lines]
        save(chosen.write, "models", chosen, "Models", [*page, "", *in_markdown(COLUMNS, table)], data)
    return data


def default_dtypes() -> list[str]:
    """Both, unless the processor has no bfloat16: torch's products then take a hundred times as long."""
    return ["fp32", "bf16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["fp32"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__, rounds=10, seconds=3.0)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=["inference", "training"], default=["inference", "training"])
    add("--dtypes", nargs="+", choices=list(DTYPES), default=default_dtypes())
    add("--batches", type=int, nargs="+", help="only these of each model's batches")
    add("--compile-only", action="store_true", help="only the cold compiles")
    add("--no-cold", action="store_true", help="leave out the cold compiles, which start three processes per case")
    add("--longest", type=float, default=20.0, help="leave out what takes eager more seconds than this (20)")
    return run(parsed(parser, argv))


if __name__ == "__main__":
    main()
