"""Apply rules to a graph, keeping every promise of the stage whatever a rule's author forgot.

Order: candidate nodes from last to first; at one node, rules in their order; nodes that a rewrite makes are candidates
too. Rules are indexed by operator, so that the cost is near-linear in the nodes.

A rewrite is written before the first root, checked, and taken back if it would break a contract: the new value has the
old one's shape, dtype, device, strides and bits; no two of the graph's inputs and outputs come to share storage that
did not, nor stop sharing it; nothing moves across a mutation; random calls are neither dropped nor doubled; no guard
on a symbol is added.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value, model_line
from ferrite.graph.regions import Regions, has_effect, is_random, mutates
from ferrite.graph.values import compute, mode_of
from ferrite.graph.verify import count_guards
from ferrite.pipeline.context import PassContext
from ferrite.rewrite.match import Match, Refusal
from ferrite.rewrite.rule import Counting, NodeRule, Rule, Site

AnyRule = Rule | NodeRule
INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "seq_nr",
    "partitioner_tag",
    "recompute",
)


def apply_rules(gm: torch.fx.GraphModule, rules: Sequence[AnyRule], context: PassContext) -> int:
    """Rewrite until no rule of the list fires; returns how often one did."""
    engine = Engine(gm, rules, context)
    total = engine.run()
    if total:
        gm.recompile()
    return total


class Engine:
    def __init__(self, gm: torch.fx.GraphModule, rules: Sequence[AnyRule], context: PassContext) -> None:
        self.gm, self.graph, self.context = gm, gm.graph, context
        self.by_target: dict[Any, list[AnyRule]] = collections.defaultdict(list)
        for rule in rules:
            for target in rule.targets:
                self.by_target[target].append(rule)
        self.counting = Counting()
        self.sharing = Sharing(self.graph)
        self.regions = Regions(self.graph)
        self.fake_mode = mode_of(self.graph)

    def run(self) -> int:
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

    def attempt(self, rule: AnyRule, node: torch.fx.Node) -> Refusal | tuple[list[torch.fx.Node], set[torch.fx.Node]]:
        """Try one rule at one node: the nodes it made and erased, or why not."""
        proposal = self.propose(rule, node)
        if isinstance(proposal, Refusal):
            return proposal
        return proposal.writer.made, self.replace(rule, proposal)

    def propose(self, rule: AnyRule, node: torch.fx.Node) -> Refusal | Proposal:
        """Write the right side of a rule and check it; nothing reads it yet."""
        match: Match | None = None
        old: tuple[torch.fx.Node, ...] = (node,)
        matched = [node]
        if isinstance(rule, Rule):
            found = rule.find(node, self.counting)
            if isinstance(found, Refusal):
                return found
            match, old, matched = found, found.roots, list(found.nodes.values())
        problem = self.placement_problem(matched)
        if problem is not None:
            return Refusal(problem)
        self.counting.steps += 1
        first = min(old)
        writer = Writer(self.graph, self.fake_mode)
        guards = count_guards(self.graph)
        with self.graph.inserting_before(first):
            try:
                new = self.build(rule, node, match, writer, matched)
            except BaseException:
                writer.take_back()
                raise
        problem = self.placement_problem(matched)
        refusal = Refusal(problem) if problem is not None else None
        if refusal is None and not isinstance(new, Refusal):
            refusal = self.replacement_problem(old, new, first, writer)
        if count_guards(self.graph) != guards:
            writer.take_back()
            raise RuntimeError(f"rule {rule.name} added a guard on a symbol")
        if isinstance(new, Refusal) or refusal is not None:
            writer.take_back()
            return new if isinstance(new, Refusal) else refusal  # type: ignore[return-value]
        return Proposal(old, new, matched, writer)

    def build(
        self,
        rule: AnyRule,
        node: torch.fx.Node,
        match: Match | None,
        writer: Writer,
        matched: list[torch.fx.Node],
    ) -> tuple[torch.fx.Node, ...] | Refusal:
        if match is not None:
            assert isinstance(rule, Rule)
            results = rule.build(match, writer.proxies)
        else:
            assert isinstance(rule, NodeRule)
            site = Site(node, writer.call)
            result = rule.rewrite(site)
            if isinstance(result, Refusal):
                return result
            matched += [item for item in dict.fromkeys(site.seen) if item not in matched]
            results = (result,)
        return tuple(item.node if isinstance(item, torch.fx.Proxy) else item for item in results)

    def placement_problem(self, matched: Sequence[torch.fx.Node]) -> str | None:
        first = matched[0]
        for node in matched:
            if is_random(node):
                return f"{node.name} draws random numbers"
            if not self.regions.same_region(first, node):
                return f"a write lies between {first.name} and {node.name}"
            if fake_value(node) is None:
                return f"{node.name} has no metadata"
        return None

    def replacement_problem(
        self, old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node], first: torch.fx.Node, writer: Writer
    ) -> Refusal | None:
        for made in writer.made:
            if is_random(made) or mutates(made):
                return Refusal(f"the right side has an effect: {made.target}")
            for operand in made.all_input_nodes:
                if operand not in writer.made and not operand < first:
                    return Refusal(f"{operand.name} is computed too late")
        for before, after in zip(old, new, strict=True):
            if after not in writer.made and not after < first:
                return Refusal(f"{after.name} is computed too late")
            problem = difference(fake_value(before), fake_value(after)) or self.sharing.problem(before, after)
            if problem is not None:
                return Refusal(problem)
        return None

    def replace(self, rule: AnyRule, proposal: Proposal) -> set[torch.fx.Node]:
        """Redirect all uses, hand on where the nodes came from, and erase what nobody reads any more."""
        origin = proposal.old[0]
        lines = tuple(dict.fromkeys(str(line) for line in map(model_line, proposal.matched) if line is not None))
        for made in proposal.writer.made:
            for key in INHERITED:
                if key in origin.meta:
                    made.meta.setdefault(key, origin.meta[key])
            made.meta["rewritten"] = (rule.name, lines)
            self.regions.adopt(made, origin)
        for before, after in zip(proposal.old, proposal.new, strict=True):
            before.replace_all_uses_with(after)
        erased: set[torch.fx.Node] = set()
        for node in sorted(proposal.matched, reverse=True):
            if not node.users and not has_effect(node):
                self.graph.erase_node(node)
                erased.add(node)
        self.sharing.refresh()
        return erased


@dataclass(frozen=True)
class Proposal:
    """A checked right side that stands in the graph unread."""

    old: tuple[torch.fx.Node, ...]
    new: tuple[torch.fx.Node, ...]
    matched: list[torch.fx.Node]
    writer: Writer


class Writer(torch.fx.proxy.GraphAppendingTracer):
    """Writes nodes into the graph, each with its fake value, and can take them back."""

    def __init__(self, graph: torch.fx.Graph, fake_mode: Any) -> None:
        super().__init__(graph)
        self.fake_mode = fake_mode
        self.made: list[torch.fx.Node] = []

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        self.made.append(node)
        node.meta["val"], bindings = compute(node, self.fake_mode)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        return node

    def proxies(self, value: Any) -> Any:
        """A bound argument with a proxy for each node in it, so that calling operators on it writes nodes."""
        if isinstance(value, torch.fx.Node):
            return torch.fx.Proxy(value, self)
        if isinstance(value, (list, tuple)):
            items = [self.proxies(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.create_node("call_function", target, args, kwargs)

    def take_back(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()


class Sharing:
    """Which storages the graph's inputs and outputs have, and which are written."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.inputs = {storage(node) for node in graph.nodes if node.op == "placeholder"} - {None}
        # whatever a writing call is given counts as written: more than need be, never less
        writers = (node for node in graph.nodes if mutates(node))
        self.written = {storage(operand) for node in writers for operand in node.all_input_nodes} - {None}
        self.refresh()

    def refresh(self) -> None:
        self.output_nodes = collections.Counter(self.graph.output_node().all_input_nodes)
        self.outputs = collections.Counter(storage(node) for node in self.output_nodes)

    def problem(self, before: torch.fx.Node, after: torch.fx.Node) -> str | None:
        """Why replacing one value by another would change what the graph's inputs and outputs share."""
        old, new = storage(before), storage(after)
        if before in self.output_nodes and (after.op == "placeholder" or after in self.output_nodes):
            return f"output {before.name} would become {after.name} itself"
        if old == new:
            return None
        if new in self.written:
            return f"{after.name} is written to later"
        visible = old in self.outputs
        if visible and (new in self.inputs or new in self.outputs):
            return f"output {before.name} would share storage with {after.name}"
        if visible and (old in self.inputs or self.outputs[old] > 1):
            return f"output {before.name} would no longer share its storage"
        return None


def storage(item: Any) -> int | None:
    value = fake_value(item) if isinstance(item, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def difference(old: Any, new: Any) -> str | None:
    """How the look of two values differs; None where they are provably alike."""
    if isinstance(old, torch.Tensor) != isinstance(new, torch.Tensor):
        return "the result is no tensor"
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            return f"there would be {len(new)} results instead of {len(old)}"
        return next((problem for problem in map(difference, old, new) if problem is not None), None)
    if not isinstance(old, torch.Tensor):
        return None if type(old) is type(new) else "the result has another type"
    for fact in ("dtype", "device", "layout"):
        if getattr(old, fact) != getattr(new, fact):
            return f"the {fact} would be {getattr(new, fact)} instead of {getattr(old, fact)}"
    for fact, left, right in (("shape", old.shape, new.shape), ("strides", old.stride(), new.stride())):
        if len(left) != len(right) or not all(map(torch_api.known_equal, left, right)):
            return f"the {fact} would be {tuple(right)} instead of {tuple(left)}"
    if old.is_conj() != new.is_conj() or old.is_neg() != new.is_neg():
        return "the conjugate or negative bit would differ"
    return None
