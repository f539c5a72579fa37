"""`docs/passes.md`, made from the passes themselves and from a table of names.

    python -m ferrite.passes.page docs/names.csv > docs/passes.md

The table says, for names that people know from PyTorch's own compiler, what does that here and which test file holds
it: columns stage, name, here, test.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ferrite.options import described
from ferrite.passes import PIPELINES
from ferrite.passes.post_grad import distributed
from ferrite.passes.post_grad.opt_in_rules import SETTINGS
from ferrite.rewrite import AnyRule


def read_names(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def reference_page(names: Iterable[Mapping[str, str]]) -> str:
    rows = [PAGE]
    for pipeline in PIPELINES:
        rows += ["", f"## Stage `{pipeline.name}`", "", "| # | pass | runs | purpose |", "|---|---|---|---|"]
        for number, step in enumerate(pipeline.passes, 1):
            rows.append(f"| {number} | `{step.name}` | {step.scope} | {step.purpose} |")
        for step in pipeline.passes:
            if step.rules:
                rows += ["", f"### Rules of `{step.name}`", ""]
                if step.names:
                    rows += [PARTS, "", *(f"- `{name}`" for name in step.names), ""]
                rows += ["| rule | purpose | fires on | does not fire on |", "|---|---|---|---|"]
                rows += [rule_row(rule) for rule in step.rules]
    rows += ["", FUSION_SETTINGS, "| name | settings |", "|---|---|"]
    rows += [f"| `{name}` | {described(kind)} |" for name, kind in SETTINGS.items()]
    rows += ["", DISTRIBUTED_SETTINGS, "| name | settings |", "|---|---|"]
    rows += [f"| `{name}` | {described(kind)} |" for name, kind in distributed.SETTINGS.items()]
    rows += ["", NAMES, "| stage | name there | here | test |", "|---|---|---|---|"]
    rows += [f"| {row['stage']} | `{row['name']}` | {row['here']} | `{row['test']}` |" for row in names]
    return "\n".join(rows) + "\n"


def rule_row(rule: AnyRule) -> str:
    fires = "; ".join(case.label for case in rule.examples)
    misses = "; ".join(case.label for case in rule.near_misses)
    return f"| `{rule.name}` | {rule.purpose} | {fires} | {misses} |"


PARTS = "Its parts, in their order. Each begins with the rule of its name, and can be skipped and run alone by it:"

FUSION_SETTINGS = """## Names in `post_grad_fusions`

Each with the settings it takes and their defaults: `options={"post_grad_fusions": {"batch_aten_tanh": {"depth": 9}}}`,
or `FERRITE_POST_GRAD_FUSIONS=batch_aten_tanh:depth=9,decompose_mm_pass`.
"""

DISTRIBUTED_SETTINGS = """## Names in `distributed`

Each with the settings it takes and their defaults ([distributed.md](distributed.md)):
`options={"distributed": {"bucket_ag": {"cap_mb": 100}, "overlap": {}}}`.
"""

NAMES = """## Names from Inductor

What does here what a name there stands for, and the test file that holds it. Names of helpers without behaviour of
their own are left out, and so are those of steps that are not built yet.
"""

PAGE = """# Passes and rules

<!-- Made from ferrite/passes/ by `make docs`; a test holds them equal. -->

Each stage is a tuple of passes, run in this order. Every pass can be left out (`options={"skip": ["name"]}`), and run
alone (`ferrite.passes.post_grad.remove_noop_ops(gm)`). A rule's examples and near misses are its tests:
`tests/rules/test_rules.py` and `tests/rules/test_pre_grad_rules.py` run them all. `tests/rules/test_rules_compiled.py`
has a program for every rule and every pass in which it fires through `torch.compile`."""


if __name__ == "__main__":
    print(reference_page(read_names(Path(sys.argv[1]))), end="")
