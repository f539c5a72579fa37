"""The table of names that people know from Inductor: what it points to exists, and its test is about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferrite.passes import PIPELINES, all_rules
from ferrite.passes.page import read_names

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
ROWS = read_names(ROOT / "docs" / "names.csv")
RULES = {rule.name: rule for rule in all_rules()}
STAGES = {pipeline.name: {step.name: step for step in pipeline.passes} for pipeline in PIPELINES}
DOORS = {"freeze": "freezing_passes"}  # passes that make sense together only are tested through the door of the stage
NOTHING_TO_NAME = ("lazy_init",)  # of Inductor, which makes its rules late: ours are there when any test begins
# They run the examples and near misses of every rule.
FOR_EVERY_RULE = ("tests/rules/test_rules.py", "tests/rules/test_pre_grad_rules.py")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['stage']}: {row['name']}")
def test_what_a_name_points_to_exists_and_is_tested(row):
    kind, _, what = row["here"].partition(" ")
    text = (ROOT / row["test"]).read_text()
    if kind not in ("rule", "pass"):
        words = set(re.findall(r"\w{4,}", f"{row['name']} {row['here']}"))
        assert row["name"] in NOTHING_TO_NAME or words & set(re.findall(r"\w+", text)), (
            "the test has nothing to do with it"
        )
        return
    if kind == "rule":
        assert RULES[what].examples
        words = {what}
    else:
        words = {what, *(rule.name for rule in STAGES[row["stage"]][what].rules)}
    if row["test"] in FOR_EVERY_RULE:
        assert kind == "rule", "only rules are tested there"
        return
    words.add(DOORS.get(row["stage"], what))
    named = words & set(re.findall(r"\w+", text))
    assert named or any(imports(module, text) for module in modules_of(row["stage"], what)), (
        "the test has nothing to do with it"
    )


def modules_of(stage: str, what: str) -> set[str]:
    """Where a pass, a rule, or the rules of a pass are written."""
    steps = [step for step in STAGES[stage].values() if what in {step.name, *(rule.name for rule in step.rules)}]
    rules = [rule for step in steps for rule in step.rules if what in (step.name, rule.name)]
    parts = [getattr(rule, part, None) for rule in rules for part in ("rewrite", "before", "write", "problem")]
    functions = [
        *(step.function for step in steps),
        *(getattr(part, "func", part) for part in parts),
        *map(type, rules),
    ]
    return {str(getattr(function, "__module__", "")) for function in functions}


def imports(module: str, text: str) -> bool:
    package, _, name = module.rpartition(".")
    direct = re.search(rf"from {re.escape(module)} import", text)
    return bool(direct or re.search(rf"from {re.escape(package)} import [^\n]*\b{name}\b", text))


def test_names_are_listed_once():
    keys = [(row["stage"], row["name"]) for row in ROWS]
    assert len(keys) == len(set(keys))
