"""The page for users of Inductor: it has every option and variable there, and names none of ours that is unknown."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from ferrite.options import FIELDS

pytestmark = pytest.mark.quick
PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
ROW = re.compile(r"^\| (`.+?) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w.*]+)`")


def rows_of(section):
    """The sides of each row of a table."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [(NAME.findall(left), right) for left, right in ROW.findall(text)]


def unknown(names, section):
    patterns = [pattern for left, _ in rows_of(section) for pattern in left]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page lists the options of torch 2.13")
def test_every_option_and_variable_of_inductors_is_on_the_page():
    import torch._inductor
    import torch._inductor.config

    assert unknown(torch._inductor.list_options(), "Options") == []
    source = Path(torch._inductor.config.__file__).read_text()
    variables = re.findall(r'"((?:TORCHINDUCTOR|TORCH_COMPILE|INDUCTOR)_[A-Z0-9_]+)"', source)
    assert len(variables) > 100
    assert unknown(variables, "Environment variables") == []


def test_a_name_that_is_not_listed_is_found_missing():
    assert unknown(["no_such_option"], "Options") == ["no_such_option"]


def test_options_and_variables_of_ours_exist():
    ours = {field.metadata["env"] for field in FIELDS.values()}
    named = set(re.findall(r"FERRITE_\w+", PAGE))
    assert len(named) > 15
    assert named <= ours
    left, right = zip(*rows_of("Options"), strict=True)
    first_named = [found[0] for text in right if (found := re.match(r"`(\w+)`", text)) and found[1]]
    assert len(first_named) > 20
    assert {each.strip("`") for each in first_named} <= set(FIELDS)
    assert all(left)


def test_hooks_have_the_names_that_they_have_there():
    for names, _ in rows_of("Hooks that work unchanged"):
        assert set(names) <= set(FIELDS)
