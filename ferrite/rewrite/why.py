"""Why a rule did not fire: every candidate root with the first condition that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ferrite.graph import ModelLine, model_line
from ferrite.options import Options
from ferrite.pipeline import PassContext
from ferrite.rewrite.engine import Engine
from ferrite.rewrite.match import Refusal
from ferrite.rewrite.rule import AnyRule, GraphRule, LocalRule, too_loose


@dataclass(frozen=True)
class NearMiss:
    """A node at which a rule could have fired. `reason` is empty where it would fire now."""

    rule: str
    node: str
    reason: str
    line: ModelLine | None

    def __str__(self) -> str:
        place = f"  ({self.line})" if self.line is not None else ""
        return f"{self.rule} at {self.node}: {self.reason or 'fires'}{place}"


def why(gm: torch.fx.GraphModule, rule: AnyRule, options: Options | None = None) -> list[NearMiss]:
    """Ask a rule about every node with its operator; the graph is left as it was."""
    context = PassContext(options or Options())
    candidates = [node for node in gm.graph.nodes if node.target in rule.targets]
    reasons: Mapping[torch.fx.Node, str]
    if (problem := too_loose(rule, context.options)) is not None:
        reasons = dict.fromkeys(candidates, problem)
    elif isinstance(rule, GraphRule):
        reasons = rule.explain(gm, context)
    else:
        engine = Engine(gm, (rule,), context)
        reasons = {node: refused(engine, rule, node) for node in candidates}
    return [NearMiss(rule.name, node.name, reason, model_line(node)) for node, reason in reasons.items()]


def refused(engine: Engine, rule: LocalRule, node: torch.fx.Node) -> str:
    outcome = engine.propose(rule, node)
    if isinstance(outcome, Refusal):
        return outcome.reason
    outcome.writer.take_back()
    return ""
