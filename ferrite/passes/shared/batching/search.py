"""Find calls that can be made as one, and make them so: the search that all batch fusions share.

From every node backwards, last node first, breadth first and a few steps deep: so members are read near each other.
What lies behind a member is not looked at from there. Without a limit on the depth all calls of one look are one group.
A group of members is split into levels: the longest chain of members that leads to each. Members of one level cannot
depend on each other, and no fusion of a level makes members of a later one do so; one walk from the first to the last
member finds all levels.

The fused call stands where all its operands are known. Users of a member that stand before are moved behind it, which
is no matter unless something with an effect stands between: then the group is split there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value, has_effect, mode_of, model_line
from ferrite.passes.shared.batching.members import Kinship, Members, Problem, Settings, is_fused
from ferrite.pipeline import PassContext, copy_graph
from ferrite.rewrite import Case, GraphRule, Layout, Numerics, Writer, arguments_of, difference, follow, inherit

aten = torch.ops.aten

MAX_NODES_SEARCHED = 2048  # nodes looked at from one root, so that the whole search stays linear in the graph
MAX_NODES_BETWEEN = 2048  # nodes between two members of a group without limits, for the same reason
UNLIMITED = sys.maxsize

# Writes the one call; the value of each member.
Write = Callable[["Fusion", Writer, Sequence[torch.fx.Node], Settings], list[torch.fx.Node]]


def plain(writer: Writer, result: torch.fx.Node, member: torch.fx.Node, settings: Settings) -> torch.fx.Node:
    return result


def stacked(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    """The call on the stacks of the operands, and a part of its result for each member."""
    target, names = members[0].target, fusion.operands[members[0].target]
    arguments = [arguments_of(member) for member in members]
    stacks = [writer.call(aten.stack.default, [given[name] for given in arguments]) for name in names]
    # What is not stacked is equal for all; a fused operator of another kind leaves it to `finish`.
    others = {} if fusion.fused else {k: v for k, v in members[0].kwargs.items() if k not in names}
    whole = writer.call(fusion.fused or target, *stacks, **others)
    results = []
    for index, member in enumerate(members):
        before = len(writer.made)
        part = writer.call(aten.select.int, whole, 0, index)
        results.append(fusion.finish(writer, part, member, settings))
        for made in writer.made[before:]:
            inherit(made, member)
    return results


@dataclasses.dataclass(frozen=True)
class Fusion(GraphRule):
    """`operands`: for each operator that makes a member, its tensors that must be there; `optional` tensors may be.
    Their shapes must be equal, and so must everything else that is not a tensor. `shared` arguments must be one and the
    same value, `free` ones may differ. `problem` says why a call is no member, `profit` why making these one is not
    worth it.

    `write` writes the one call. With the usual one `fused` is called on the stacks, the member's own operator if None;
    `finish` makes the member's value of its part. `needs` is a library without which nothing is fused.

    `kinship(graph)` gives a function that says of a node what its members share, for members that are more than one
    call; then nothing else is compared but place, device and gradient.

    `before_autograd`: the graph is not functional, and gradients will be computed. `copies_returned`: a member whose
    memory the caller gets becomes a copy of its part; otherwise it is no member.
    """

    name: str
    purpose: str
    operands: Mapping[Any, tuple[str, ...]]
    problem: Problem
    fused: Any = None
    finish: Callable[[Writer, torch.fx.Node, torch.fx.Node, Settings], torch.fx.Node] = plain
    needs: str = ""
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()
    numerics: Numerics = "exact"
    layout: Layout = "kept"
    optional: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    write: Write = stacked
    kinship: Kinship | None = None
    before_autograd: bool = False
    copies_returned: bool = False

    @property
    def targets(self) -> tuple[Any, ...]:
        return tuple(self.operands)

    def settings(self, context: PassContext) -> Settings:
        return Settings()

    def profit(self, members: Sequence[torch.fx.Node], returned: int, context: PassContext) -> Refusal | None:
        return None

    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        settings = self.settings(context)
        candidates = sum(node.target in self.operands for node in gm.graph.nodes)
        return FusionSearch(gm, self, settings, context).run() if candidates >= settings.min_members else 0

    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        """Fuse on a copy of the graph, and tell why what is left of the candidates is left."""
        copied = torch.fx.GraphModule(gm, copy_graph(gm.graph))
        own = PassContext(context.options, context.is_inference)
        while (search := FusionSearch(copied, self, self.settings(own), own)).run():
            continue
        left = {node.name: refusal for node, refusal in search.refusals()}
        return {node: left.get(node.name) for node in gm.graph.nodes if node.target in self.operands}


class FusionSearch:
    """One fusion on one graph; `left` has why a member stayed out."""

    def __init__(self, gm: torch.fx.GraphModule, fusion: Fusion, settings: Settings, context: PassContext) -> None:
        self.graph, self.fusion, self.settings, self.context = gm.graph, fusion, settings, context
        self.mode = mode_of(gm.graph)
        self.members = Members(gm.graph, settings, fusion, is_inference=context.is_inference)
        # Nodes of one zone have nothing between them whose place matters: no random draw, no collective, no write.
        # Members themselves may draw: they are made as one anyway.
        effects = (has_effect(node) and node not in self.members.keys for node in gm.graph.nodes)
        self.zones = dict(zip(gm.graph.nodes, itertools.accumulate(effects), strict=True))
        self.left: dict[torch.fx.Node, Refusal] = {}
        self.tried: set[tuple[torch.fx.Node, ...]] = set()

    def run(self) -> int:
        total = 0
        for members in self.groups():
            for subset in self.placeable(members):
                if not self.context.fuel.left:
                    return total
                total += self.fuse(subset)
        return total

    def groups(self) -> Iterator[list[torch.fx.Node]]:
        """Groups of equal calls: near one root after the other, or wherever they are."""
        if self.settings.depth == UNLIMITED:
            yield from self.all_groups()
            return
        root = self.graph.output_node()
        # Whatever is made or moved stands before the root it was found from: nodes that a fusion makes are roots, too.
        while self.members.keys and root.op != "root":
            yield from self.candidates(root)
            root = root.prev

    def all_groups(self) -> Iterator[list[torch.fx.Node]]:
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        found: dict[Hashable, list[list[torch.fx.Node]]] = collections.defaultdict(list)
        for node, look in self.members.keys.items():
            runs = found[look]
            if not runs or places[node] - places[runs[-1][-1]] > MAX_NODES_BETWEEN:
                runs.append([])
            runs[-1].append(node)
        for members in itertools.chain.from_iterable(found.values()):
            if len(members) >= self.settings.min_members:
                yield members
            else:
                self.leave(members, Refusal(f"the others like it stand more than {MAX_NODES_BETWEEN} nodes away"))

    def candidates(self, root: torch.fx.Node) -> Iterator[list[torch.fx.Node]]:
        """Groups of equal calls near a root. An item of a tuple is no root: its siblings see the same from there."""
        if root.target is operator.getitem:
            return
        found: dict[Hashable, list[torch.fx.Node]] = collections.defaultdict(list)
        waiting = collections.deque((1, operand) for operand in root.all_input_nodes)
        seen = {operand for _, operand in waiting}
        while waiting:
            self.context.steps += 1
            depth, node = waiting.popleft()
            if node in self.members.keys:
                found[self.members.keys[node]].append(node)
            elif (
                depth < self.settings.depth and len(seen) < MAX_NODES_SEARCHED and not is_fused(node, self.fusion.name)
            ):
                fresh = [operand for operand in node.all_input_nodes if operand not in seen]
                seen.update(fresh)
                waiting.extend((depth + 1, operand) for operand in fresh)
        for nodes in found.values():
            members = sorted(nodes)
            if len(members) >= self.settings.min_members and tuple(members) not in self.tried:
                self.tried.add(tuple(members))
                yield members

    def placeable(self, members: Sequence[torch.fx.Node]) -> Iterator[list[torch.fx.Node]]:
        """Subsets within the limits whose members are independent and can stand together."""
        least, most = self.settings.min_members, self.settings.max_members
        for level in self.levels(members):
            if len(level) < least:
                why = f"of those near it only {len(level)} do not depend on each other, {least} are wanted"
                self.leave(level, Refusal(why))
                continue
            by_zone: dict[Any, list[torch.fx.Node]] = collections.defaultdict(list)
            crowded = has_early_user(level)
            for member in level:
                by_zone[self.zones[member] if crowded else None].append(member)
            for subset in by_zone.values():
                if len(subset) < least:
                    self.leave(subset, Refusal("a write, a random draw or the like stands between it and the others"))
                    continue
                for start in range(0, len(subset), most):
                    part = subset[start : start + most]
                    if len(part) >= least:
                        yield part
                    else:
                        why = f"at most {most} may be fused, of these {len(part)}; {least} are wanted"
                        self.leave(part, Refusal(why))

    def leave(self, members: Sequence[torch.fx.Node], refusal: Refusal) -> None:
        self.left |= dict.fromkeys(members, refusal)

    def refusals(self) -> Iterator[tuple[torch.fx.Node, Refusal]]:
        """Why each call of the operators that is there is not fused."""
        yield from self.members.refusals()
        wanted, depth = self.settings.min_members, self.settings.depth
        too_far = Refusal(f"no {wanted} like it are read within {depth} steps of one node")
        for node in self.members.keys:
            yield node, self.left.get(node, too_far)

    def levels(self, members: Sequence[torch.fx.Node]) -> list[list[torch.fx.Node]]:
        wanted, chain = set(members), dict[torch.fx.Node, int]()
        found: dict[int, list[torch.fx.Node]] = collections.defaultdict(list)
        node = members[0]
        while True:
            self.context.steps += 1
            chain[node] = max((chain.get(operand, 0) for operand in node.all_input_nodes), default=0)
            if node in wanted:
                found[chain[node]].append(node)
                chain[node] += 1
            if node is members[-1]:
                return [found[number] for number in sorted(found)]
            node = node.next

    def fuse(self, members: list[torch.fx.Node]) -> int:
        """Let one call take the place of the members; how many rewrites that is."""
        returned = {member for member in members if member in self.members.returned}
        problem = self.fusion.profit(members, len(returned), self.context)
        if problem is not None:
            self.leave(members, problem)
            return 0
        outcome = self.written(members, returned)
        may_copy = self.fusion.copies_returned and self.fusion.profit(members, len(members), self.context) is None
        if isinstance(outcome, Refusal) and may_copy and len(returned) < len(members):
            # Somebody could tell that a part lies inside a larger tensor.
            outcome = self.written(members, set(members))
        if isinstance(outcome, Refusal):
            self.leave(members, outcome)
            return 0
        writer, results, values = outcome
        lines = tuple(dict.fromkeys(str(line) for line in map(model_line, members) if line is not None))
        for made in writer.made:
            made.meta["rewritten"] = (self.fusion.name, lines)
            inherit(made, members[0])
        for old, new in zip(members, results, strict=True):
            old.replace_all_uses_with(new)
            del values[old]
            self.erase_unread(old)
        for node, value in values.items():
            node.meta["val"] = value
        self.move_users_behind(writer.made, results)
        self.context.fuel.spend()
        self.context.count(self.fusion.name)
        return 1

    def written(
        self, members: list[torch.fx.Node], copied: set[torch.fx.Node]
    ) -> Refusal | tuple[Writer, list[torch.fx.Node], dict[torch.fx.Node, Any]]:
        """The one call in the graph, unread: the results, and the values that would change behind them."""
        writer = Writer(self.graph, self.mode)
        last = last_operand(members)
        with self.graph.inserting_before(members[0] if last < members[0] else last.next):
            try:
                results = self.fusion.write(self.fusion, writer, members, self.settings)
                for place, member in enumerate(members):
                    if member in copied:
                        results[place] = copy_of(writer, results[place], member)
            except BaseException:
                writer.take_back()
                raise
        kept = self.fusion.layout == "kept"
        pairs = list(zip(members, results, strict=True))
        unlike = [difference(fake_value(old), fake_value(new), layout_matters=kept) for old, new in pairs]
        values = follow({old: fake_value(new) for old, new in pairs}, self.mode) if not any(unlike) else {}
        if isinstance(values, dict) and not any(unlike):
            return writer, results, values
        writer.take_back()
        return values if isinstance(values, Refusal) else Refusal(next(filter(None, unlike)))

    def erase_unread(self, node: torch.fx.Node) -> None:
        """A member, and what belonged to it alone."""
        operands = node.all_input_nodes
        self.graph.erase_node(node)
        self.members.keys.pop(node, None)
        for operand in operands:
            if operand.op == "call_function" and not operand.users and not has_effect(operand):
                self.erase_unread(operand)

    def move_users_behind(self, made: list[torch.fx.Node], results: list[torch.fx.Node]) -> None:
        """Keep the order valid: what depends on a result and stands before it moves right behind, in its order."""
        late, anchor = set(results), made[-1]
        node = min((user for result in results for user in result.users), default=anchor)
        while node < made[0]:
            self.context.steps += 1
            after = node.next
            if any(operand in late for operand in node.all_input_nodes):
                late.add(node)
                anchor.append(node)
                anchor = node
            node = after


def copy_of(writer: Writer, part: torch.fx.Node, member: torch.fx.Node) -> torch.fx.Node:
    """Memory of its own, and rows behind each other, as the member had."""
    copied = writer.call(aten.clone.default, part, memory_format=torch.contiguous_format)
    inherit(copied, member)
    return copied


def last_operand(members: Sequence[torch.fx.Node]) -> torch.fx.Node:
    return max(operand for member in members for operand in member.all_input_nodes)


def has_early_user(members: Sequence[torch.fx.Node]) -> bool:
    """Whether a value is read before all operands of all members are known."""
    last = last_operand(members)
    return any(user < last for member in members for user in member.users)
