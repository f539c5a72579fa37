"""Rules and the engine that applies them.

In: a GraphModule whose nodes carry fake values, and rules. Out: the module rewritten in place. The engine holds the
contracts of the stage for every rule; `why` tells where a rule did not fire and the first condition that failed.
"""

from ferrite.rewrite.engine import apply_rules
from ferrite.rewrite.match import Match, Refusal
from ferrite.rewrite.rule import AnyRule, Case, GraphRule, NodeRule, Rule, Site
from ferrite.rewrite.visible import difference
from ferrite.rewrite.why import NearMiss, why
from ferrite.rewrite.writer import Writer, inherit

__all__ = [
    "AnyRule",
    "Case",
    "GraphRule",
    "Match",
    "NearMiss",
    "NodeRule",
    "Refusal",
    "Rule",
    "Site",
    "Writer",
    "apply_rules",
    "difference",
    "inherit",
    "why",
]
