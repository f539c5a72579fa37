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
    parser.add_argument("folder", type=Path, help="what FERRITE_DUMP named, for all its graphs; or one folder in it")
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
    folders = graphs_in(chosen.folder, chosen.stage, list(instead))
    differs = False
    for folder in folders:
        found = replay(folder, chosen.stage, instead)
        if chosen.into is not None:
            into = chosen.into / folder.name if len(folders) > 1 else chosen.into
            into.mkdir(parents=True, exist_ok=True)
            for name, text in found.files.items():
                (into / name).write_text(text)
        print(f"{folder.name}: {found}" if len(folders) > 1 else found)
        differs = differs or found.difference is not None
    return 1 if differs else 0


def graphs_in(folder: Path, stage: str | None, replaced: list[str]) -> list[Path]:
    """The folders of graphs: the one that is named, or those in it that came as far as a stage and its files."""
    if (folder / "replay.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/replay.json"))
    if stage not in (None, "captured"):
        found = [each for each in found if (each / "program.py").is_file()]
    found = [each for each in found if all((each / name).is_file() for name in replaced)]
    if len(found) > 1 and replaced:
        names = ", ".join(each.name for each in found)
        raise UserError(f"several graphs have a file {replaced[0]}", {"to change that": f"name one folder: {names}"})
    return found or [folder]


def named_file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    file = Path(path if separator else text)
    if not file.is_file():
        raise UserError(f"there is no file {file}", {"expected": "FILE, or NAME=FILE"})
    return (name if separator else file.name), file
