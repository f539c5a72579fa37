"""The rewrites of each stage, one folder per stage, one file per family.

In: an FX graph of the stage. Out: an FX graph that computes the same, cheaper. Each stage is one tuple of passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import UserError, nearest
from ferrite.options import NoSettings, Options, check_choices
from ferrite.passes.candidates import candidate
from ferrite.passes.freezing import FREEZE, freezing_passes, inline_parameters, inlined_with_record, siblings
from ferrite.passes.joint import JOINT, joint_graph_passes
from ferrite.passes.names import with_full_names
from ferrite.passes.post_grad import POST_GRAD, check_fusions, post_grad_passes
from ferrite.passes.post_grad.distributed import (
    CollectiveRecord,
    CommunicationRecord,
    all_agreed,
    captured_communication,
    check_distributed,
    check_ranks,
    communication_identity,
    communication_of,
)
from ferrite.passes.pre_grad import (
    PRE_GRAD,
    Tolerance,
    add_values,
    numerics_checked,
    pre_grad_passes,
    reason_to_leave,
    sum_of_linears,
    unlike_values,
    values_to_examples,
)
from ferrite.passes.pre_grad.horizontal import FusionLimits, Horizontal
from ferrite.passes.pre_grad.numeric_check import check_settings
from ferrite.passes.pre_grad.split_cat import PARTS, PartSettings
from ferrite.passes.shared.flops import flops_of_call
from ferrite.pipeline import Pipeline
from ferrite.rewrite import AnyRule, NearMiss
from ferrite.rewrite import why as ask

__all__ = [
    "FREEZE",
    "JOINT",
    "PIPELINES",
    "POST_GRAD",
    "PRE_GRAD",
    "CollectiveRecord",
    "CommunicationRecord",
    "Tolerance",
    "add_values",
    "all_agreed",
    "all_rules",
    "candidate",
    "captured_communication",
    "check_ranks",
    "checked_options",
    "communication_identity",
    "communication_of",
    "describe",
    "flops_of_call",
    "freezing_passes",
    "inline_parameters",
    "inlined_with_record",
    "joint_graph_passes",
    "numerics_checked",
    "post_grad_passes",
    "pre_grad_passes",
    "reason_to_leave",
    "unlike_values",
    "values_to_examples",
    "why",
]

PIPELINES: tuple[Pipeline, ...] = (PRE_GRAD, JOINT, FREEZE, POST_GRAD)


def checked_options(options: Options) -> Options:
    """The options with passes by their full names; a UserError for a name that no pass or group of rewrites has."""
    check_fusions(options)
    check_settings(options)
    check_distributed(options)
    if not isinstance(options.horizontal, str):
        check_choices("horizontal", options.horizontal, horizontal_rules(), "rule")
    if not isinstance(options.split_cat, str):
        check_choices("split_cat", options.split_cat, dict.fromkeys(PARTS, PartSettings), "pass")
    if options.freeze_discard_parameters and not torch_api.GUARDS_CAN_GO:
        raise UserError(
            "option 'freeze_discard_parameters' needs torch 2.13 or newer",
            {"because": "before, every call looks at the parameters again", "here": f"torch {torch.__version__}"},
        )
    return with_full_names(options, PIPELINES)


def horizontal_rules() -> dict[str, type[Any]]:
    """The rules that the option `horizontal` is about, with the settings that each takes."""
    found: dict[str, type[Any]] = {rule.name: FusionLimits for rule in all_rules() if isinstance(rule, Horizontal)}
    return found | dict.fromkeys((sum_of_linears.NAME, siblings.NAME), NoSettings)


def all_rules(stage: str | None = None) -> Iterator[AnyRule]:
    """The rules of a stage, or of all; a rule that several passes share comes once."""
    chosen = (pipeline for pipeline in PIPELINES if stage in (None, pipeline.name))
    seen: set[int] = set()
    for rule in (rule for pipeline in chosen for step in pipeline.passes for rule in step.rules):
        if id(rule) not in seen:
            seen.add(id(rule))
            yield rule


def why(gm: torch.fx.GraphModule, name: str, options: Options | None = None) -> list[NearMiss]:
    """Where a rule could have fired in a graph, and the first condition that failed at each place."""
    rules = {rule.name: rule for rule in all_rules()}
    if name not in rules:
        raise UserError(
            f"there is no rule {name!r}",
            {"did you mean": nearest(name, rules), "all rules": "print(ferrite.passes.describe())"},
        )
    return ask(gm, rules[name], options)


def describe() -> str:
    """Every stage, pass and rule with its one-line purpose."""
    rows = []
    for pipeline in PIPELINES:
        rows.append(str(pipeline))
        for step in pipeline.passes:
            rows += [f"        {step.name} / {rule.name}: {rule.purpose}" for rule in step.rules]
    return "\n".join(rows)
