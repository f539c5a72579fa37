"""`python -m ferrite diff A B`: what changed from one report to another; its exit status tells a CI."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ferrite.errors import UserError
from ferrite.reports import as_text, compare, compare_page, read_record

TOLERANCE = 0.25


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="what changed from one report to another",
        description="Compare two reports (pages or records): versions, machine, options, passes, kernels, calls of "
        "torch, memory, times. The exit status is 0 if nothing changed, 1 if something did, 2 if that is not known.",
    )
    parser.add_argument("before", type=Path, help="a page or record that `python -m ferrite report` wrote")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="PART",
        help=f"times are the same that differ by no more than this part (default {TOLERANCE}; inf: leave times out)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if not chosen.tolerance >= 0:
        raise UserError(f"--tolerance is {chosen.tolerance}", {"expected": "a part from 0 on, such as 0.1"})
    before, after = read_record(chosen.before), read_record(chosen.after)
    changes = compare(before, after, chosen.tolerance)
    print(as_text(changes))
    if chosen.html is not None:
        try:
            text = compare_page(changes, (chosen.before.name, before), (chosen.after.name, after))
            chosen.html.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as problem:
            raise UserError(f"cannot write {chosen.html}", {"because": str(problem)}) from None
    return 1 if changes else 0
