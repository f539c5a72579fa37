"""The table of names that people know from Inductor: what it points to exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrite.passes import PIPELINES, all_rules
from ferrite.passes.page import read_names

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
ROWS = read_names(ROOT / "docs" / "names.csv")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['stage']}: {row['name']}")
def test_what_a_name_points_to_exists(row):
    rules = {rule.name for rule in all_rules()}
    passes = {step.name for pipeline in PIPELINES for step in pipeline.passes}
    kind, _, what = row["here"].partition(" ")
    if kind in ("rule", "pass"):
        assert what in (rules if kind == "rule" else passes)
    assert "def test_" in (ROOT / row["test"]).read_text()


def test_names_are_listed_once():
    keys = [(row["stage"], row["name"]) for row in ROWS]
    assert len(keys) == len(set(keys))
