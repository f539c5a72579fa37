"""`python -m ferrite ops`: how every operator is lowered."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ferrite.capture import every_operator
from ferrite.errors import UserError
from ferrite.lower import families, how_lowered

KINDS = ("lowered", "composed", "in place", "template", "eager")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("ops", help="list how each operator is lowered", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of operator names; none means all")
    parser.add_argument("--kind", choices=KINDS, help="only those lowered in this way")
    parser.add_argument(
        "--markdown", metavar="CSV", help="print the page docs/operators.md, with results from this file"
    )
    parser.set_defaults(run=run)


def rows(names: Sequence[str] = (), kind: str | None = None) -> list[tuple[str, str, str]]:
    """(operator, how, note) of every functional and in-place operator of aten and prims, in order."""
    families.load()
    found = []
    for name, operator in every_operator():
        if names and not any(part in name for part in names):
            continue
        how, note = how_lowered(operator)
        if kind is None or how == kind:
            found.append((name, how, note))
    return found


def run(chosen: argparse.Namespace) -> int:
    if chosen.markdown is not None:
        print(page(Path(chosen.markdown)), end="")
        return 0
    found = rows(chosen.names, chosen.kind)
    if not found:
        raise UserError("no operator has that name", {"asked for": ", ".join(chosen.names) or chosen.kind})
    table = Table(box=None, pad_edge=False)
    for column in ("operator", "how", "note"):
        table.add_column(column, overflow="fold")
    for row in found:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(summary(found))
    return 0


def summary(found: Sequence[tuple[str, str, str]]) -> str:
    count = Counter(how for _, how, _ in found)
    return ", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind]) + f" of {len(found)}"


def page(results: Path) -> str:
    """docs/operators.md: the tables, and what the sweep over torch's own samples found."""
    found = rows()
    parts = [HEAD.format(summary=summary(found))]
    for kind in KINDS:
        names = [
            f"`{name}`" + (f" ({note})" if note and kind != "in place" else "")
            for name, how, note in found
            if how == kind
        ]
        parts.append(f"### {kind}\n\n{', '.join(names) or 'none'}\n")
    parts.append(SWEEP)
    with results.open(newline="") as file:
        for row in csv.reader(file):
            parts.append("| " + " | ".join(row) + " |")
    return "\n".join(parts) + "\n"


HEAD = """# Operators

<!-- Made by `make docs` from the tables in ferrite/lower and the recorded sweep; a test holds the tables equal. -->

How each operator of ATen and prims becomes part of a loop program: {summary}.

- **lowered**: a function in `ferrite/lower/ops/`.
- **composed**: taken apart by torch's own decomposition, whose parts are lowered.
- **in place**: the operator without the underscore, then a store into the first argument.
- **template**: a matrix product, convolution or attention, which calls torch's kernel.
- **eager**: one call of torch, with the reason.

`python -m ferrite ops NAME` prints the same for some operators.

### What eager leaves open

Results are eager's, but for what eager itself does not fix:

- **Which of equal elements**: `topk`, `median` and `nanmedian` along a dimension may name any of several equal ones, as
  torch documents. Loops name the first; they are used for 32 and 64-bit floats, where equals are rare, and for every
  type where only the values are read. `kthvalue` on a CPU documents no such freedom: its place comes from torch.
- **The sign of a zero**: of zeros of both signs, `maximum`, `minimum`, `clamp` and `relu` return either, depending on
  whether eager's vector or scalar code runs. So does `gelu` with `approximate="tanh"` where the result is zero. On x86,
  where eager's `relu` keeps a negative zero in both, loops keep it too.
- **`fmod` where the quotient overflows**: eager's vector code gives NaN, its scalar code the remainder. Loops give the
  remainder.
"""

SWEEP = """## What the sweep found

Every operator that torch has sample inputs for, traced, lowered and interpreted, against eager and a float64 run.
`lowered`: no call of torch inside but templates; `called`: with some; `untraced`: torch itself cannot trace it. The
types are float32, bfloat16, int64 and complex64, and the worst verdict counts; of each the first sample of which the
input has several elements along each dimension. Single numbers, and dimensions of one or no element, are calls of torch
more often: eager's own checks decide what it takes.
"""
