"""The rewrites of each stage, one folder per stage, one file per family.

In: an FX graph of the stage. Out: an FX graph that computes the same, cheaper. Each stage is one tuple of passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ferrite.errors import UserError, nearest
from ferrite.passes.post_grad import POST_GRAD, check_fusions, post_grad_passes
from ferrite.pipeline import Pipeline
from ferrite.rewrite import AnyRule, NearMiss
from ferrite.rewrite import why as ask

__all__ = [
    "PIPELINES",
    "POST_GRAD",
    "all_rules",
    "check_fusions",
    "describe",
    "post_grad_passes",
    "reference_page",
    "why",
]

PIPELINES: tuple[Pipeline, ...] = (POST_GRAD,)


def all_rules() -> Iterator[AnyRule]:
    for pipeline in PIPELINES:
        for step in pipeline.passes:
            yield from step.rules


def why(gm: torch.fx.GraphModule, name: str) -> list[NearMiss]:
    """Where a rule could have fired in a graph, and the first condition that failed at each place."""
    rules = {rule.name: rule for rule in all_rules()}
    if name not in rules:
        raise UserError(
            f"there is no rule {name!r}",
            {"did you mean": nearest(name, rules), "all rules": "print(ferrite.passes.describe())"},
        )
    return ask(gm, rules[name])


def describe() -> str:
    """Every stage, pass and rule with its one-line purpose."""
    rows = []
    for pipeline in PIPELINES:
        rows.append(str(pipeline))
        for step in pipeline.passes:
            rows += [f"        {step.name} / {rule.name}: {rule.purpose}" for rule in step.rules]
    return "\n".join(rows)


def reference_page() -> str:
    """`docs/passes.md`, made from the passes themselves."""
    rows = [PAGE]
    for pipeline in PIPELINES:
        rows += [f"## Stage `{pipeline.name}`", "", "| # | pass | runs | purpose |", "|---|---|---|---|"]
        for number, step in enumerate(pipeline.passes, 1):
            rows.append(f"| {number} | `{step.name}` | {step.awaits or step.scope} | {step.purpose} |")
        for step in pipeline.passes:
            if step.rules:
                rows += ["", f"### Rules of `{step.name}`", "", "| rule | purpose | fires on | does not fire on |"]
                rows.append("|---|---|---|---|")
                rows += [rule_row(rule) for rule in step.rules]
    return "\n".join(rows) + "\n"


def rule_row(rule: AnyRule) -> str:
    fires = "; ".join(case.label for case in rule.examples)
    misses = "; ".join(case.label for case in rule.near_misses)
    return f"| `{rule.name}` | {rule.purpose} | {fires} | {misses} |"


PAGE = """# Passes and rules

<!-- Made from ferrite/passes/ by `make docs`; a test holds them equal. -->

Each stage is a tuple of passes, run in this order. Every pass can be left out (`options={"skip": ["name"]}`), and run
alone (`ferrite.passes.post_grad.remove_noop_ops(gm)`). A rule's examples and near misses are its tests:
`tests/rules/test_rules.py` runs them all.
"""
