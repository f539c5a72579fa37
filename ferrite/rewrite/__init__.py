"""Rules and the engine that applies them.

In: a GraphModule whose nodes carry fake values, and rules. Out: the module rewritten in place. The engine holds the
contracts of the stage for every rule; `why` tells where a rule did not fire and the first condition that failed.
"""

from ferrite.rewrite.arguments import MISSING, arguments_of, in_order, parameters_of, same_literal
from ferrite.rewrite.engine import apply_rules
from ferrite.rewrite.layout import (
    follow,
    only_ones_differ,
    reads_memory,
    same_strides,
    who_could_tell,
)
from ferrite.rewrite.match import Match, Matcher
from ferrite.rewrite.pattern import Items, Pattern, Variable, count_uses, trace_pattern
from ferrite.rewrite.rule import AnyRule, Case, GraphRule, Layout, NodeRule, Numerics, Rule, Site, too_loose
from ferrite.rewrite.visible import VisibleMemory, difference
from ferrite.rewrite.why import NearMiss, why
from ferrite.rewrite.writer import INHERITED, Writer, inherit

__all__ = [
    "INHERITED",
    "MISSING",
    "AnyRule",
    "Case",
    "GraphRule",
    "Items",
    "Layout",
    "Match",
    "Matcher",
    "NearMiss",
    "NodeRule",
    "Numerics",
    "Pattern",
    "Rule",
    "Site",
    "Variable",
    "VisibleMemory",
    "Writer",
    "apply_rules",
    "arguments_of",
    "count_uses",
    "difference",
    "follow",
    "in_order",
    "inherit",
    "only_ones_differ",
    "parameters_of",
    "reads_memory",
    "same_literal",
    "same_strides",
    "too_loose",
    "trace_pattern",
    "who_could_tell",
    "why",
]
