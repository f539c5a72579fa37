"""What was found, as a folder: run.py shows it again by itself.

run.py          runs the smallest graph compiled and in eager, and says how they differ
graph.py        that graph, and stand-ins for its inputs (shapes and types, no contents)
before.*        the graph, or the schedule, before what is to blame, and `after.*` behind it
summary.txt     what is to blame
about.json      the same as data, with options and versions
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrite.diagnosis.bisect.finding import Finding
from ferrite.diagnosis.bisect.sources import check_source
from ferrite.errors import UserError, layout

RUN = '''"""{headline}: python run.py"""

import sys
from pathlib import Path

from ferrite.diagnosis.bisect import rerun

sys.exit(rerun(Path(__file__).parent))
'''


def keep(finding: Finding, root: Path, setup: str) -> str:
    """Write the folder; where."""
    import ferrite

    small, changed = finding.small, finding.changed
    about = {
        "name": finding.name,
        "kind": finding.kind,
        "symptom": finding.symptom,
        "stage": finding.stage,
        "part": finding.part,
        "rule": finding.rule,
        "line": finding.line,
        "avoid": dict(finding.avoid),
        **(dict(small.about) if small is not None else {}),
        "setup": str(Path(setup).resolve()) if setup.endswith(".py") else setup,
        "versions": {"ferrite": ferrite.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.machine(),
    }
    files = {"summary.txt": summary(finding) + "\n", "about.json": json.dumps(about, indent=2) + "\n"}
    if small is not None:
        files |= {"graph.py": small.text, "run.py": RUN.format(headline=finding.name)}
    if changed is not None:
        files |= {f"before{changed.suffix}": changed.before, f"after{changed.suffix}": changed.after}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:8]
    folder = root / f"{finding.stage}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def summary(finding: Finding) -> str:
    """What a person wants to read."""
    small = finding.small
    shown = None if small is None else f"{small.calls} calls of {small.before}:\n{body_of(small.text)}"
    kept = None if finding.folder is None else finding.folder
    return layout(
        f"to blame: {finding.name}",
        {
            "what happens": f"{finding.kind}: {finding.symptom}",
            "where": finding.about,
            "in your model" if finding.stage == "lower" else "graph begins": finding.line,
            "smallest graph": shown or "the graph alone does not show it: it takes the numbers of the check",
            "kept": kept,
            "to see it again": f"python {kept}/run.py" if kept and small is not None else None,
            "until it is mended": f"options={dict(finding.avoid)!r}" if finding.avoid else None,
        },
    )


def body_of(text: str) -> str:
    """The lines of `forward`."""
    lines = text[text.index("def forward(") :].partition("\n\n")[0].splitlines()
    return "\n".join(line.strip() for line in lines)


def check_of_folder(folder: Path, timed: bool = False) -> tuple[Callable[[], float | None], str]:
    """The check of a folder that was kept here, or by a stage that failed (a repro folder); and what it has to load."""
    try:
        about: Mapping[str, Any] = json.loads((folder / "about.json").read_text())
        text = (folder / "graph.py").read_text()
    except OSError as problem:
        raise UserError(
            f"{folder} holds no graph", {"because": str(problem), "expected": "a folder with graph.py and about.json"}
        ) from None
    modes = {"grad": about.get("grad", True), "dynamic": about.get("dynamic", False)}
    known = {**modes, "options": about["options"], "setup": about.get("setup", "")}
    return check_source(text, known, timed or about.get("kind") == "slow"), known["setup"]


def rerun(folder: Path) -> int:
    """Try it here, in this process; what run.py does."""
    check, _setup = check_of_folder(folder)
    print((folder / "summary.txt").read_text())
    try:
        found = check()
    except AssertionError as problem:
        print(f"it is still so: {problem}")
        return 1
    if found is not None and found > 0.0:
        print(f"it is still so: {found * 1e3:.2f} ms slower than eager")
        return 1
    print("not here: compiled and eager are the same")
    return 0
