"""Why a rule did not fire: every candidate root with the first condition that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ferrite.errors import Refusal
from ferrite.graph import ModelLine, model_line
from ferrite.options import Options
from ferrite.pipeline import PassContext
from ferrite.rewrite.engine import Engine
from ferrite.rewrite.rule import AnyRule, GraphRule, LocalRule, too_loose


@dataclass(frozen=True)
class NearMiss:
    """A node at which a rule could have fired, and why it did not; without a refusal it would fire now."""

    rule: str
    node: str
    refusal: Refusal | None
    line: ModelLine | None

    @property
    def reason(self) -> str:
        """Empty where it would fire."""
        return "" if self.refusal is None else self.refusal.reason

    def __str__(self) -> str:
        return f"{self.rule} at {self.node}: {self.refusal or Refusal('fires', self.line)}"


def why(gm: torch.fx.GraphModule, rule: AnyRule, options: Options | None = None) -> list[NearMiss]:
    """Ask a rule about every node with its operator; the graph is left as it was."""
    context = PassContext(options or Options())
    candidates = [node for node in gm.graph.nodes if node.target in rule.targets]
    refusals: Mapping[torch.fx.Node, Refusal | None]
    if (problem := too_loose(rule, context.options)) is not None:
        refusals = dict.fromkeys(candidates, problem)
    elif isinstance(rule, GraphRule):
        refusals = rule.explain(gm, context)
    else:
        engine = Engine(gm, (rule,), context)
        refusals = {node: refused(engine, rule, node) for node in candidates}
    lines = {node: model_line(node) for node in refusals}
    return [
        NearMiss(rule.name, node.name, None if refusal is None else refusal.at(lines[node]), lines[node])
        for node, refusal in refusals.items()
    ]


def refused(engine: Engine, rule: LocalRule, node: torch.fx.Node) -> Refusal | None:
    outcome = engine.propose(rule, node)
    if isinstance(outcome, Refusal):
        return outcome
    outcome.writer.take_back()
    return None
