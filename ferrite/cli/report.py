"""`python -m ferrite report MODULE:CALLABLE`: compile a user's function and write a page about it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ferrite.cli import specs
from ferrite.cli.compile import add_call_arguments, backward, find, parse_option

MEASURED_CALLS = 12  # with --measure: the first ones meet cold caches, and the median of all is shown


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="compile a function or module and write a page about it",
        description="Compile MODULE:CALLABLE, call it with the given arguments, and write one file of HTML that shows "
        "what became of it: source beside graph, loops, kernels and code, passes, fusion, memory, times.",
        epilog=specs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_call_arguments(parser)
    parser.add_argument("--to", metavar="FILE", default="report.html", help="the page; FILE.json: the record alone")
    parser.add_argument("--measure", action="store_true", help="also measure each kernel and each call of torch")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    import ferrite
    from ferrite.reports import check_place

    check_place(Path(chosen.to).expanduser())
    function = find(chosen.target)
    settings = dict(parse_option(text) for text in chosen.option)
    inputs = [specs.parse_argument(text, requires_grad=chosen.train) for text in chosen.arguments]
    before = ferrite.recent_compiles()
    kept = {"report": Path(chosen.to), "measure": chosen.measure, **settings}
    compiled = ferrite.compile(function, mode=chosen.mode, dynamic=chosen.dynamic or None, **kept)
    with torch.set_grad_enabled(chosen.train):
        for _ in range(MEASURED_CALLS if chosen.measure else 1):
            outputs = compiled(*inputs)
            if chosen.train:
                backward(outputs)
    records = [record for record in ferrite.recent_compiles() if record not in before]
    where = ferrite.report(chosen.to)
    kernels = sum(len(record.kernels) for record in records)
    calls = sum(len(record.eager_calls) for record in records)
    print(f"{where}: {len(records)} compilations, {kernels} kernels, {calls} calls of torch, {size_text(where)}")
    return 0


def size_text(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
