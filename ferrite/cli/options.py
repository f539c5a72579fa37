"""`python -m ferrite options`: every option, its value here, and what it does."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from ferrite.options import FIELDS, reference_page, resolve, type_name


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "options", help="list every option with its value here", description="List every option."
    )
    parser.add_argument("--markdown", action="store_true", help="print the reference page docs/options.md")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.markdown:
        print(reference_page(), end="")
        return 0
    current = resolve()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for column in ("option", "value here", "type", "environment", "meaning"):
        table.add_column(column, overflow="fold")
    for name, field in FIELDS.items():
        facts = field.metadata
        table.add_row(name, str(getattr(current, name)), type_name(name), facts["env"], facts["doc"])
    Console(highlight=False).print(table)
    return 0
