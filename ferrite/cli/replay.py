"""`python -m ferrite replay DUMP/003_forward`: run stages again from a dump, edited by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ferrite.errors import UserError

STAGES = ("captured", "lower", "schedule", "codegen", "load")
DESCRIPTION = """
captured     00_captured.py, the graph as it came: passes, lower, schedule, codegen, load
lower        the graph after the last pass, the .py file with the highest number
schedule     program.py, the loop program
codegen      kernels.py, the kernels as text of the loop IR
load         kernel_0.ll (kernel_0.py on a GPU) and the like: what kernels are compiled from

What is run is held against the captured graph in eager, on stand-ins for its inputs.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="run stages of a dumped compile again, edited by hand",
        description=__doc__ + DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of one graph, in a folder that FERRITE_DUMP named")
    parser.add_argument("--from", dest="stage", choices=STAGES, help="the first stage that runs")
    parser.add_argument(
        "--replace",
        action="append",
        default=[],
        metavar="FILE",
        help="a file in place of the one with its name in the dump (NAME=FILE where it has another); may be repeated",
    )
    parser.add_argument("--into", type=Path, help="write what was made here: program, kernels, host program")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    from ferrite.diagnosis import replay

    instead = dict(named_file(text) for text in chosen.replace)
    found = replay(chosen.folder, chosen.stage, instead)
    if chosen.into is not None:
        chosen.into.mkdir(parents=True, exist_ok=True)
        for name, text in found.files.items():
            (chosen.into / name).write_text(text)
    print(found)
    return 0 if found.difference is None else 1


def named_file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    file = Path(path if separator else text)
    if not file.is_file():
        raise UserError(f"there is no file {file}", {"expected": "FILE, or NAME=FILE"})
    return (name if separator else file.name), file
