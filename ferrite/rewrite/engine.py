"""Apply rules to a graph, keeping every promise of the stage whatever a rule's author forgot.

Order: candidate nodes from last to first; at one node, rules in their order; nodes that a rewrite makes are candidates
too. Rules are indexed by operator, so that the cost is near-linear in the nodes.

A rewrite is written before the first root, checked, and taken back if it would break a contract: the new value has the
old one's shape, dtype, device, strides and bits; no two of the graph's inputs and outputs come to share storage that
did not, nor stop sharing it; nothing moves across a mutation, or from one execution stream to another; random calls are
neither dropped nor doubled, unless the rule says that it draws anew; no guard on a symbol is added. Under a rule with a
free layout strides may change where nobody can tell, unless numerics are strict; the values behind a rewrite are kept
true (see `layout`).

Rules over the whole graph come last, each in its turn, until none of them finds anything.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import (
    Regions,
    fake_value,
    guards_in,
    has_effect,
    is_random,
    mode_of,
    model_line,
    mutates,
    same_number,
    storages_of,
    stream_of,
)
from ferrite.pipeline import PassContext
from ferrite.rewrite.layout import follow
from ferrite.rewrite.match import Match
from ferrite.rewrite.remembered import Remembered, remembered
from ferrite.rewrite.rule import AnyRule, Counting, GraphRule, LocalRule, NodeRule, Rule, Site, too_loose
from ferrite.rewrite.visible import VisibleMemory, difference
from ferrite.rewrite.writer import Writer, inherit

MAX_INDEXES = 1024  # lists of rules whose index is kept: some are made for one graph
Pair = tuple[torch.fx.Node, torch.fx.Node]  # a node, and the one that takes its place


def apply_rules(gm: torch.fx.GraphModule, rules: Sequence[AnyRule], context: PassContext) -> int:
    """Rewrite until no rule of the list fires; returns how often one did."""
    if not rules:
        return 0
    engine = Engine(gm, rules, context)
    total = engine.run()
    if total and not context.code_waits:
        gm.recompile()
    return total


@dataclass(frozen=True)
class RuleIndex:
    rules: tuple[AnyRule, ...]
    by_target: Mapping[Any, Sequence[LocalRule]]  # in the order of the rules
    over_all: Sequence[GraphRule]


_indexes: dict[tuple[int, ...], RuleIndex] = {}  # by the addresses of rules, which an index keeps alive


def index_of(rules: Sequence[AnyRule]) -> RuleIndex:
    """Made once for each list of rules: most lists are constants, and most graphs have nothing for them."""
    key = tuple(map(id, rules))
    if (found := _indexes.get(key)) is not None:
        return found
    by_target: dict[Any, list[LocalRule]] = collections.defaultdict(list)
    over_all: list[GraphRule] = []
    for rule in rules:
        if isinstance(rule, GraphRule):
            over_all.append(rule)
            continue
        for target in rule.targets:
            by_target[target].append(rule)
    if len(_indexes) == MAX_INDEXES:
        _indexes.clear()
    _indexes[key] = index = RuleIndex(tuple(rules), dict(by_target), over_all)
    return index


class Engine:
    def __init__(self, gm: torch.fx.GraphModule, rules: Sequence[AnyRule], context: PassContext) -> None:
        self.gm, self.graph, self.context = gm, gm.graph, context
        index = index_of(rules)
        self.by_target = index.by_target
        self.over_all = [rule for rule in index.over_all if too_loose(rule, context.options) is None]
        self.counting = Counting()
        self.answers: dict[Any, Any] = {}

    # Facts about the whole graph, gathered only once a rule has found a candidate: most rules find none.

    @functools.cached_property
    def whole(self) -> Remembered:
        return remembered(self.gm, self.context)

    @property
    def sharing(self) -> VisibleMemory:
        return self.whole.sharing

    @property
    def regions(self) -> Regions:
        return self.whole.regions

    @functools.cached_property
    def fake_mode(self) -> Any:
        return mode_of(self.graph)

    def run(self) -> int:
        total = self.run_local()
        while made := sum(rule.apply(self.gm, self.context) for rule in self.over_all):
            total += made
        return total

    def run_local(self) -> int:
        total = 0
        waiting = [node for node in self.graph.nodes if node.target in self.by_target]
        gone: set[torch.fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in gone:
                continue
            for rule in self.by_target[node.target]:
                if not self.context.fuel.left:
                    return total
                outcome = self.attempt(rule, node)
                if isinstance(outcome, Refusal):
                    if self.context.refused is not None:
                        self.context.refused(rule.name, node, outcome)
                    continue
                made, erased = outcome
                self.context.fuel.spend()
                self.context.count(rule.name)
                total += 1
                gone |= erased
                waiting += [new for new in made if new.target in self.by_target]
                if node in gone:
                    break
        self.context.steps += self.counting.steps
        return total

    def attempt(self, rule: LocalRule, node: torch.fx.Node) -> Refusal | tuple[list[torch.fx.Node], set[torch.fx.Node]]:
        """Try one rule at one node: the nodes it made and erased, or why not."""
        proposal = self.propose(rule, node)
        if isinstance(proposal, Refusal):
            return proposal
        return proposal.writer.made, self.replace(rule, proposal)

    def propose(self, rule: LocalRule, node: torch.fx.Node) -> Refusal | Proposal:
        """Write the right side of a rule and check it; nothing reads it yet."""
        if (problem := too_loose(rule, self.context.options)) is not None:
            return problem
        match: Match | None = None
        old: tuple[torch.fx.Node, ...] = (node,)
        matched = [node]
        if isinstance(rule, Rule):
            found = rule.find(node, self.counting, self.context.options)
            if isinstance(found, Refusal):
                return found
            match, old, matched = found, found.roots, list(found.nodes.values())
        elif rule.roots is not None:
            roots = rule.roots(node)
            if isinstance(roots, Refusal):
                return roots
            old, matched = tuple(roots), list(dict.fromkeys((node, *roots)))
        unknown = next((item.name for item in matched if fake_value(item) is None), None)
        if unknown is not None:
            return Refusal(f"{unknown} has no metadata")
        self.counting.steps += 1
        first = min(old)
        writer = Writer(self.graph, self.fake_mode)
        guards = guards_in(self.fake_mode)
        with self.graph.inserting_before(first):
            try:
                new = self.build(rule, node, old, match, writer, matched)
            except BaseException:
                writer.take_back()
                raise
        if guards_in(self.fake_mode) != guards:
            writer.take_back()
            raise RuntimeError(f"rule {rule.name} added a guard on a symbol")
        outcome = new if isinstance(new, Refusal) else self.checked(rule, old, new, matched, writer)
        if isinstance(outcome, Refusal):
            writer.take_back()
        return outcome

    def build(
        self,
        rule: LocalRule,
        node: torch.fx.Node,
        old: tuple[torch.fx.Node, ...],
        match: Match | None,
        writer: Writer,
        matched: list[torch.fx.Node],
    ) -> tuple[torch.fx.Node, ...] | Refusal:
        if match is not None:
            assert isinstance(rule, Rule)
            results = rule.build(match, writer.proxies)
        else:
            assert isinstance(rule, NodeRule)
            site = Site(
                node,
                writer.call,
                self.context.options,
                constant=writer.constant,
                written=self.sharing.written,
                is_inference=self.context.is_inference,
                roots=old,
                answers=self.answers,
                times=self.context.times,
            )
            result = rule.rewrite(site)
            if isinstance(result, Refusal):
                return result
            matched += [item for item in dict.fromkeys(site.seen) if item not in matched]
            results = result if isinstance(result, tuple) else (result,)
        return tuple(item.node if isinstance(item, torch.fx.Proxy) else item for item in results)

    def checked(
        self,
        rule: LocalRule,
        old: tuple[torch.fx.Node, ...],
        new: tuple[torch.fx.Node, ...],
        matched: list[torch.fx.Node],
        writer: Writer,
    ) -> Refusal | Proposal:
        """What stands in the graph unread, with the values that would change behind it."""
        pairs = list(zip(old, new, strict=True))
        # Sums over other strides add up in another order, which strict numerics forbid.
        layout_matters = rule.layout == "kept" or self.context.options.numerics == "strict"
        problem = (  # the cheapest question, which most candidates fail, comes first
            self.look_problem(pairs, writer, layout_matters=layout_matters)
            or self.placement_problem(matched, draws_anew(rule))
            or self.views_problem(matched)
            or self.order_problem(pairs, min(old), writer, draws_anew(rule))
            or self.gradient_problem(pairs, writer)
        )
        if problem is not None:
            return problem
        values = follow({before: fake_value(after) for before, after in pairs}, self.fake_mode)
        if isinstance(values, Refusal):
            return values
        self.counting.steps += len(values)
        problem = self.sharing.problem(pairs, values)
        return Proposal(pairs, values, matched, writer) if problem is None else problem

    def placement_problem(self, matched: Sequence[torch.fx.Node], redraws: bool) -> Refusal | None:
        first = matched[0]
        for node in matched:
            if is_random(node) and not redraws:
                return Refusal(f"{node.name} draws random numbers")
            if not self.regions.same_region(first, node):
                return Refusal(f"a write lies between {first.name} and {node.name}")
            if stream_of(node) != stream_of(first):
                return Refusal(f"{first.name} and {node.name} run on different streams")
            if fake_value(node) is None:
                return Refusal(f"{node.name} has no metadata")
        return None

    def views_problem(self, matched: Sequence[torch.fx.Node]) -> Refusal | None:
        """Autograd forbids reading a piece of a split once the memory was written: with another view, it would not."""
        if not self.sharing.written or self.context.is_inference:
            return None
        splits = dict.fromkeys(node.args[0] if node.target is operator.getitem else node for node in matched)
        for node in splits:
            if not isinstance(node, torch.fx.Node) or not isinstance(fake_value(node), (list, tuple)):
                continue
            memory = storages_of(node).intersection(*map(storages_of, node.all_input_nodes[:1])) & self.sharing.written
            if not memory.isdisjoint(self.sharing.differentiated):
                return Refusal(f"{node.name} views memory that is written to and differentiated")
        return None

    def gradient_problem(self, pairs: Sequence[Pair], writer: Writer) -> Refusal | None:
        """The gradient of an input has the strides along dimensions of one that its last call gives it, and autograd
        keeps them: that of `x.split(1)[0]` is a copy, with x of (1, 1), that of `pad(x, (1, 0))` a part of a row."""
        if self.context.is_inference:
            return None
        for before, after in pairs:
            value = fake_value(after)
            if after in writer.made or not isinstance(value, torch.Tensor):
                continue
            if any(same_number(size, 1) for size in value.shape) and not storages_of(after).isdisjoint(
                self.sharing.with_gradients
            ):
                return Refusal(f"the gradient of {after.name} would no longer go through {before.name}")
        return None

    def order_problem(
        self, pairs: Sequence[Pair], first: torch.fx.Node, writer: Writer, redraws: bool
    ) -> Refusal | None:
        for made in writer.made:
            if (is_random(made) and not redraws) or mutates(made):
                return Refusal(f"the right side has an effect: {made.target}")
            for operand in made.all_input_nodes:
                if operand not in writer.made and not operand < first:
                    return Refusal(f"{operand.name} is computed too late")
        late = (after for _, after in pairs if after not in writer.made and not after < first)
        return next((Refusal(f"{node.name} is computed too late") for node in late), None)

    def look_problem(self, pairs: Sequence[Pair], writer: Writer, *, layout_matters: bool) -> Refusal | None:
        for before, after in pairs:
            unlike = difference(fake_value(before), fake_value(after), layout_matters=layout_matters)
            if unlike is not None:
                return Refusal(unlike)
            if after not in writer.made and stream_of(after) != stream_of(before):
                return Refusal(f"{after.name} is computed on another stream")
        return None

    def replace(self, rule: LocalRule, proposal: Proposal) -> set[torch.fx.Node]:
        """Redirect all uses, hand on where the nodes came from, and erase what nobody reads any more."""
        origin = proposal.pairs[0][0]
        lines = tuple(dict.fromkeys(str(line) for line in map(model_line, proposal.matched) if line is not None))
        for made in proposal.writer.made:
            inherit(made, origin)
            made.meta["rewritten"] = (rule.name, lines)
            self.regions.adopt(made, origin)
        self.sharing.commit(proposal.pairs, proposal.values)
        replaced = dict(proposal.pairs)
        for node, value in proposal.values.items():
            if node in replaced:
                node.replace_all_uses_with(replaced[node])
            else:
                node.meta["val"] = value
        erased: set[torch.fx.Node] = set()
        for node in sorted(proposal.matched, reverse=True):
            replaced_draw = draws_anew(rule) and is_random(node) and not mutates(node)
            if not node.users and (replaced_draw or not has_effect(node)):
                self.graph.erase_node(node)
                erased.add(node)
        return erased


def draws_anew(rule: LocalRule) -> bool:
    """Whether a rule takes random calls and writes others in their place."""
    return rule.numerics == "redrawn"


@dataclass(frozen=True)
class Proposal:
    """A checked right side that stands in the graph unread; `values` are those of `pairs` and what changes behind."""

    pairs: Sequence[Pair]
    values: Mapping[torch.fx.Node, Any]
    matched: list[torch.fx.Node]
    writer: Writer
