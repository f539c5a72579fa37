"""What compiling costs, stage by stage, in fresh processes: with empty caches, and again with the caches that left.

    python -m bench.compile_time [--layers 3 6 12] [--rounds N] [--write]

A BERT of few or many layers is compiled, for inference and for training. `Dynamo` is the first call less all that
ferrite records and less a call without compiling. `AOTAutograd` is the stage `capture` of the record, less the stages
inside it. The others are ferrite's own, from its record. The last lines tell what a layer more costs: a compiler that
is linear in the size of the model takes as long for one in a deep model as in a shallow one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backends import INDUCTOR, OURS, backends, in_fresh_process
from bench.report import in_markdown, parsed, parser_for, save, selected, show, watched

NOT_OURS = ("Dynamo", "AOTAutograd")
TORCHS = {"capture": "AOTAutograd", "partition": "AOTAutograd"}  # stages that are torch's work
Case = tuple[int, bool]


def name_of(case: Case) -> str:
    layers, training = case
    return f"bert-{layers}-layers/{'training' if training else 'inference'}"


def stages_of(answer: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by stage, torch's and ours."""
    seconds, recorded = answer["seconds"], answer["stages"]
    rest = seconds["first"] - seconds["second"] - sum(recorded.values())
    found = {"Dynamo": max(0.0, rest), "AOTAutograd": 0.0}
    for stage, taken in recorded.items():
        name = TORCHS.get(stage, stage)
        found[name] = found.get(name, 0.0) + taken
    return found


def own_share(stages: Mapping[str, float]) -> float:
    return sum(taken for stage, taken in stages.items() if stage not in NOT_OURS)


def compiled_in_turn(case: Case, names: Sequence[str], threads: int) -> dict[str, Any]:
    """One round: each backend cold in a fresh process, and ferrite once more with the cache that is left."""
    layers, training = case
    request = {"model": f"bert-{layers}-layers", "batch": 2, "dtype": "float32", "training": training}
    request |= {"threads": threads}
    found: dict[str, Any] = {}
    for backend in names:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            caches = Path(folder)
            found[f"{backend}, cold"] = in_fresh_process("bench.fresh", {**request, "backend": backend}, caches)
            if backend != "aot_eager":
                found[f"{backend}, warm"] = in_fresh_process("bench.fresh", {**request, "backend": backend}, caches)
    return found


def middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each stage."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: statistics.median(each.get(name, 0.0) for each in rounds) for name in names}


def row_of(case: Case, start: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the results: one case, one backend, cold or warm, over all rounds."""
    row: dict[str, Any] = {"case": name_of(case), "layers": case[0], "training": case[1], "start": start}
    failed = next((answer["failed"] for answer in answers if "failed" in answer), None)
    if failed is not None:
        return {**row, "failed": failed}
    row["first_call"] = statistics.median(answer["seconds"]["first"] for answer in answers)
    if start.startswith(OURS):
        row["stages"] = middle([stages_of(answer) for answer in answers])
        row["own"] = statistics.median(own_share(stages_of(answer)) for answer in answers)
        row |= {name: answers[0][name] for name in ("operators", "kernels", "eager_calls", "failures")}
    return row


def per_layer(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Ferrite's own seconds per layer that is added, from each depth to the next, by kind and start."""
    found: dict[str, dict[str, float]] = {}
    for training in (False, True):
        for start in ("cold", "warm"):
            same = [row for row in rows if row["training"] is training and row["start"] == f"{OURS}, {start}"]
            depths = sorted((row["layers"], row["own"]) for row in same if "own" in row)
            slopes = {
                f"{few} to {many}": (later - earlier) / (many - few)
                for (few, earlier), (many, later) in itertools.pairwise(depths)
            }
            if slopes:
                found[f"{'training' if training else 'inference'}, {start}"] = slopes
    return found


def shown(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells; one column for each stage that occurs."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.get("stages", {})))
    columns = [
        "model",
        "start",
        "first call, s",
        *(f"{stage}, s" for stage in stages),
        "ferrite's own, s",
        "kernels",
        "",
    ]
    cells = []
    for row in rows:
        taken = row.get("stages", {})
        numbers = [f"{taken[stage]:.3f}" if stage in taken else "" for stage in stages]
        own = f"{row['own']:.3f}" if "own" in row else ""
        first = f"{row['first_call']:.2f}" if "first_call" in row else "-"
        note = row.get("failed") or "; ".join(row.get("failures", []))
        cells.append([row["case"], row["start"], first, *numbers, own, str(row.get("kernels", "")), note])
    return columns, cells


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    names = ["aot_eager", OURS]
    if INDUCTOR in backends(not chosen.no_inductor):
        names.append(INDUCTOR)
    layers = chosen.layers or ([1, 2] if chosen.quick else [3, 6, 12])
    kinds = (False,) if chosen.quick else (False, True)
    cases = selected([(count, training) for count in layers for training in kinds], name_of, chosen.only)
    turns = [(turn, case) for turn in range(chosen.rounds) for case in cases]
    answers: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    for _, case in watched(turns, lambda item: f"round {item[0] + 1}: {name_of(item[1])}"):
        for start, answer in compiled_in_turn(case, names, chosen.threads).items():
            answers.setdefault((case, start), []).append(answer)
    rows = [row_of(case, start, found) for (case, start), found in answers.items()]
    growth = per_layer(rows)
    lines = [
        f"Ferrite's own per added layer, {what}: "
        + ", ".join(f"{cost * 1e3:.1f} ms from {step} layers" for step, cost in slopes.items())
        for what, slopes in growth.items()
    ]
    columns, cells = shown(sorted(rows, key=lambda row: (row["training"], row["layers"])))
    show("Compile time", columns, cells, lines)
    data = {"rows": rows, "per_layer": growth, "rounds": chosen.rounds}
    if chosen.write:
        page = [*(f"{line}  " for line in lines), "", *in_markdown(columns, cells)]
        save(chosen.write, "compile_time", chosen, "Compile time of a BERT, stage by stage", page, data)
    return data


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__, rounds=3, seconds=0)
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers (3 6 12)")
    return run(parsed(parser, argv))


if __name__ == "__main__":
    main()
