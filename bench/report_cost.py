"""What a report costs: first calls with one asked for and without, in fresh processes, turn by turn, with empty caches.

    python -m bench.report_cost [--only PATTERN] [--rounds N] [--write]

A model is compiled with nothing asked for, and with the option `report`; then the page is written. Ratios are of the
two processes of one round, and the median of the rounds is shown; memory is the most that a process held.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backends import OURS, in_fresh_process
from bench.report import in_markdown, parsed, parser_for, save, selected, show, watched

MODELS = ("bert-3-layers", "bert-12-layers", "resnet", "gpt2")
Case = tuple[str, bool]
Answer = Mapping[str, Any]


def name_of(case: Case) -> str:
    model, training = case
    return f"{model}/{'training' if training else 'inference'}"


def in_turn(case: Case, threads: int, turn: int) -> dict[str, Answer]:
    """One round: without and with a report, in an order that changes from round to round."""
    model, training = case
    request = {"model": model, "batch": 2, "dtype": "float32", "training": training, "threads": threads}
    found: dict[str, Answer] = {}
    for way in ("plain", "report") if turn % 2 == 0 else ("report", "plain"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            caches = Path(folder)
            options = {"report": str(caches / "page.html")} if way == "report" else {}
            answer = in_fresh_process("bench.fresh", {**request, "backend": OURS, "options": options}, caches)
            page = caches / "page.html"
            found[way] = {**answer, "bytes": page.stat().st_size if page.exists() else 0}
    return found


def row_of(case: Case, rounds: Sequence[Mapping[str, Answer]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name_of(case)}
    failed = next((answer["failed"] for each in rounds for answer in each.values() if "failed" in answer), None)
    if failed is not None:
        return {**row, "failed": failed}

    def middle(way: str, name: str) -> float:
        return statistics.median(each[way]["seconds"][name] for each in rounds)

    ratios = [each["report"]["seconds"]["first"] / each["plain"]["seconds"]["first"] for each in rounds]
    return {
        **row,
        "plain": middle("plain", "first"),
        "report": middle("report", "first"),
        "ratio": statistics.median(ratios),
        "write": middle("report", "write"),
        "memory": {way: statistics.median(each[way]["memory"] for each in rounds) for way in ("plain", "report")},
        "bytes": rounds[0]["report"]["bytes"],
    }


def shown(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = [
        "model",
        "first call, s",
        "with a report, s",
        "times",
        "writing it, s",
        "MiB",
        "with it, MiB",
        "page, MB",
        "",
    ]
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append([row["case"], *[""] * (len(columns) - 2), row["failed"]])
            continue
        memory = row["memory"]
        numbers = [f"{row[name]:.2f}" for name in ("plain", "report", "ratio", "write")]
        numbers += [f"{memory['plain']:.0f}", f"{memory['report']:.0f}", f"{row['bytes'] / 1e6:.1f}"]
        cells.append([row["case"], *numbers, ""])
    return columns, cells


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    models = chosen.models or (MODELS[:1] if chosen.quick else MODELS)
    cases = selected([(model, training) for model in models for training in (False, True)], name_of, chosen.only)
    turns = [(turn, case) for turn in range(chosen.rounds) for case in cases]
    answers: dict[Case, list[dict[str, Answer]]] = {}
    for turn, case in watched(turns, lambda item: f"round {item[0] + 1}: {name_of(item[1])}"):
        answers.setdefault(case, []).append(in_turn(case, chosen.threads, turn))
    rows = [row_of(case, found) for case, found in answers.items()]
    columns, cells = shown(rows)
    show("What a report costs", columns, cells, [])
    data = {"rows": rows, "rounds": chosen.rounds}
    if chosen.write:
        save(chosen.write, "report_cost", chosen, "What a report costs", in_markdown(columns, cells), data)
    return data


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__, rounds=5, seconds=0)
    parser.add_argument("--models", nargs="+", help=f"models of the benchmark ({' '.join(MODELS)})")
    return run(parsed(parser, argv))


if __name__ == "__main__":
    main()
