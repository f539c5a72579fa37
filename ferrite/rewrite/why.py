"""Why a rule did not fire: every candidate root with the first condition that failed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferrite.graph import ModelLine, model_line
from ferrite.options import Options
from ferrite.pipeline.context import PassContext
from ferrite.rewrite.engine import AnyRule, Engine
from ferrite.rewrite.match import Refusal


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


def why(gm: torch.fx.GraphModule, rule: AnyRule) -> list[NearMiss]:
    """Ask a rule about every node with its operator; the graph is left as it was."""
    engine = Engine(gm, (rule,), PassContext(Options()))
    found = []
    for node in [node for node in gm.graph.nodes if node.target in rule.targets]:
        outcome = engine.propose(rule, node)
        if not isinstance(outcome, Refusal):
            outcome.writer.take_back()
        reason = outcome.reason if isinstance(outcome, Refusal) else ""
        found.append(NearMiss(rule.name, node.name, reason, model_line(node)))
    return found
