"""docs/extending.md, followed to the letter: its changes are made in a copy of the package, and its programs run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.test_layers import past_front_doors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def apply_difference(path: Path, difference: str) -> None:
    """Lines that begin with a blank or a minus are there, once; those with a blank or a plus are there afterwards."""
    lines = difference.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has this {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after))


def apply_block(kind: str, path: Path, text: str) -> None:
    if kind == "diff":
        apply_difference(path, text)
    elif kind == "copy":
        shutil.copy(ROOT / text.strip(), path)
    else:
        path.write_text((path.read_text() + "\n\n" if path.exists() else "") + text)


def assert_linted(paths: Iterable[Path]) -> None:
    """What a contributor copies from the page passes `make check`."""
    if find_spec("ruff") is None:
        return
    for command in (["check"], ["format", "--check"]):
        asked = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*asked, *map(str, paths)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_changes_work_as_the_page_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ferrite", tmp_path / "ferrite", ignore=shutil.ignore_patterns("__pycache__"))
    program, changed = "", dict[Path, None]()
    for kind, file, text in BLOCK.findall(PAGE):
        if file:
            apply_block(kind, tmp_path / file, text)
            changed[tmp_path / file] = None
        else:
            program += text
    assert_linted(changed)
    assert not [wrong for path in changed for wrong in past_front_doors(path, tmp_path / "ferrite")]
    program += f"assert ferrite.__file__.startswith({str(tmp_path)!r})\nprint('all of it ran')\n"
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "FERRITE_EXECUTOR": "native"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of it ran\n")


@pytest.mark.quick
@pytest.mark.parametrize("section", SECTIONS)
def test_it_counts_the_files_to_change(section: str) -> None:
    stated = re.search(r"^\*\*(\d) files?\*\*", SECTIONS[section], re.MULTILINE)
    assert stated
    assert int(stated[1]) == len({file for _kind, file, _text in BLOCK.findall(SECTIONS[section]) if file})


@pytest.mark.quick
def test_a_difference_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\ny = 2\n")
    apply_difference(path, " x = 1\n+z = 3\n-y = 2\n")
    assert path.read_text() == "x = 1\nz = 3\n"
    with pytest.raises(AssertionError, match="0 times"):
        apply_difference(path, " y = 2\n+z = 3\n")
