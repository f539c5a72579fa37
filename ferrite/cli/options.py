"""`python -m ferrite options`: every option, its value here, and what it does."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from ferrite.options import FIELDS, MODES, TYPES, resolve, type_name


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
        table.add_row(name, str(getattr(current, name)), type_name(TYPES[name]), facts["env"], facts["doc"])
    Console(highlight=False).print(table)
    return 0


def reference_page() -> str:
    """`docs/options.md`, made from the object itself."""
    rows = ["| option | type | default | environment | changes code | meaning |", "|---|---|---|---|---|---|"]
    for name, field in FIELDS.items():
        facts = field.metadata
        kind = type_name(TYPES[name]).replace("|", "\\|")
        code = "yes" if facts["changes_code"] else "no"
        rows.append(f"| `{name}` | {kind} | `{field.default}` | `{facts['env']}` | {code} | {facts['doc']} |")
    modes = ["| mode | same as |", "|---|---|"]
    for mode, settings in MODES.items():
        same = ", ".join(f"`{name}={value}`" for name, value in settings.items()) or "the defaults"
        modes.append(f"| `{mode}` | {same} |")
    return PAGE.format(options="\n".join(rows), modes="\n".join(modes))


PAGE = """# Options

<!-- Made from ferrite/options/ by `make docs`; a test holds them equal. -->

Where a setting can be given, most local first; the more local one wins:

1. an explicit option: `torch.compile(model, backend="ferrite", options={{"strict": True}})` or
   `ferrite.compile(model, strict=True)`
2. a mode: `torch.compile(model, backend="ferrite", mode="max-autotune")`
3. a context manager: `with ferrite.using(strict=True): ...`, for what is compiled while it is active
4. the environment: `FERRITE_STRICT=1`
5. the default

An unknown name or an ill-typed value is a `ferrite.UserError` that names the nearest valid one. "Changes code" says
whether a setting can change the code that is generated, and so belongs to the cache key.

{options}

## Modes

`torch.compile` takes a mode or options, not both; `ferrite.compile(model, mode=..., strict=True)` takes both.

{modes}
"""
