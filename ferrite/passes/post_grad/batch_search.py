"""Find calls that can be made as one, and make them so: the search that all batch fusions share.

From every node backwards, last node first, breadth first and a few steps deep: so members are read near each other.
What lies behind a member is not looked at from there. A group of members is split into levels: the longest chain of
members that leads to each. Members of one level cannot depend on each other, and no fusion of a level makes members of
a later one do so; one walk from the first to the last member finds all levels.

The fused call stands where all its operands are known. Users of a member that stand before are moved behind it, which
is no matter unless something with an effect stands between: then the group is split there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value, model_line
from ferrite.graph.aliases import Aliases
from ferrite.graph.regions import Regions, has_effect
from ferrite.graph.values import mode_of
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, Refusal
from ferrite.rewrite.arguments import arguments_of
from ferrite.rewrite.engine import INHERITED, Writer, difference

aten = torch.ops.aten

WIDEST_SEARCH = 2048  # nodes looked at from one root, so that the whole search stays linear in the graph


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a fusion may be told.

    `same_parent` and `same_users` let only those calls be members whose first operands, whose users are calls of the
    same operators. `broadcast_bias` spells out how a bias spreads. `external_lib` asks for a fusion only where the
    kernel library is installed.
    """

    depth: int = 5
    min_members: int = 5
    max_members: int = 300
    same_parent: bool = False
    same_users: bool = False
    broadcast_bias: bool = False
    external_lib: bool = False


def plain(writer: Writer, result: torch.fx.Node, member: torch.fx.Node, settings: Settings) -> torch.fx.Node:
    return result


@dataclasses.dataclass(frozen=True)
class Fusion:
    """`operands`: for each operator that makes a member, its arguments that are stacked; all others must be equal.
    `problem` says why a call is no member. `fused` is called on the stacks, the member's own operator if None;
    `finish` makes the member's value of its part. `needs` is a library without which nothing is fused.
    """

    name: str
    purpose: str
    operands: Mapping[Any, tuple[str, ...]]
    problem: Callable[[Mapping[str, Any], tuple[torch.Tensor, ...]], str | None]
    fused: Any = None
    finish: Callable[[Writer, torch.fx.Node, torch.fx.Node, Settings], torch.fx.Node] = plain
    needs: str = ""
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()


class Search:
    """One fusion on one graph. `keys` has what must be equal among members, for each node that may be one; `refused`
    has why a call of the same operator may not."""

    def __init__(self, gm: torch.fx.GraphModule, fusion: Fusion, settings: Settings, context: PassContext) -> None:
        self.graph, self.fusion, self.settings, self.context = gm.graph, fusion, settings, context
        self.mode = mode_of(gm.graph)
        self.aliases, self.regions = Aliases(gm.graph), Regions(gm.graph)
        # Nodes of one zone have nothing between them whose place matters: no random draw, no collective, no write.
        self.zones = dict(zip(gm.graph.nodes, itertools.accumulate(map(has_effect, gm.graph.nodes)), strict=True))
        found = {node: self.key(node) for node in gm.graph.nodes if node.target in fusion.operands}
        self.refused = {node: key.reason for node, key in found.items() if isinstance(key, Refusal)}
        sizes = collections.Counter(key for node, key in found.items() if node not in self.refused)
        self.keys = {node: key for node, key in found.items() if sizes[key] >= settings.min_members}
        self.tried: set[tuple[torch.fx.Node, ...]] = set()

    def key(self, node: torch.fx.Node) -> Hashable | Refusal:
        arguments, result, stacked = arguments_of(node), fake_value(node), self.fusion.operands[node.target]
        if self.is_fused(node):
            return Refusal("it is the result of a fusion")
        given = {name: fake_value(item) for name, item in arguments.items() if isinstance(item, torch.fx.Node)}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if not isinstance(result, torch.Tensor) or not tensors.keys() >= set(stacked):
            return Refusal("an operand is no tensor, or has no metadata")
        everything = (result, *tensors.values())
        if any((value.device, value.layout) != (result.device, torch.strided) for value in everything):
            return Refusal("it is not all strided and on one device")
        if not self.aliases.of(node).isdisjoint(self.aliases.output_storages):
            return Refusal("the caller gets it, and would get its neighbours' memory with it")
        problem = self.fusion.problem(arguments, tuple(tensors[name] for name in stacked))
        if problem is not None:
            return Refusal(problem)
        looks = [(value.dtype, shape_key(value) if name in stacked else name) for name, value in tensors.items()]
        # The type belongs to it: 1 and 1.0 and True are equal, but promote differently.
        others = [(name, type(item), str(item)) for name, item in arguments.items() if name not in tensors]
        parent = operator_of(arguments[stacked[0]]) if self.settings.same_parent else None
        users = tuple(map(operator_of, node.users)) if self.settings.same_users else None
        stream = str((node.meta.get("custom") or {}).get("stream"))
        place = (result.device, self.regions.of(node), stream)
        return (node.target, place, tuple(looks), tuple(others), parent, users)

    def is_fused(self, node: torch.fx.Node) -> bool:
        return bool(node.meta.get("rewritten", ("",))[0] == self.fusion.name)

    def run(self) -> int:
        total = 0
        root = self.graph.output_node()
        # Whatever is made or moved stands before the root it was found from: nodes that a fusion makes are roots, too.
        while self.keys and root.op != "root":
            for members in self.candidates(root):
                for subset in self.placeable(members):
                    if not self.context.fuel.left:
                        return total
                    total += self.fuse(subset)
            root = root.prev
        return total

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
            if node in self.keys:
                found[self.keys[node]].append(node)
            elif depth < self.settings.depth and len(seen) < WIDEST_SEARCH and not self.is_fused(node):
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
        for level in self.levels(members):
            by_zone: dict[Any, list[torch.fx.Node]] = collections.defaultdict(list)
            crowded = has_early_user(level)
            for member in level:
                by_zone[self.zones[member] if crowded else None].append(member)
            for subset in by_zone.values():
                for start in range(0, len(subset), self.settings.max_members):
                    part = subset[start : start + self.settings.max_members]
                    if len(part) >= self.settings.min_members:
                        yield part

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
        """Write the fused call, let it take the place of the members; how many rewrites that is."""
        writer = Writer(self.graph, self.mode)
        last = last_operand(members)
        with self.graph.inserting_before(members[0] if last < members[0] else last.next):
            try:
                results = self.write(writer, members)
            except BaseException:
                writer.take_back()
                raise
        unlike = [difference(fake_value(old), fake_value(new)) for old, new in zip(members, results, strict=True)]
        if any(unlike):
            writer.take_back()
            self.refused |= {old: reason for old, reason in zip(members, unlike, strict=True) if reason}
            return 0
        lines = tuple(dict.fromkeys(str(line) for line in map(model_line, members) if line is not None))
        for made in writer.made:
            made.meta["rewritten"] = (self.fusion.name, lines)
            inherit(made, members[0])
        for old, new in zip(members, results, strict=True):
            old.replace_all_uses_with(new)
            self.graph.erase_node(old)
            del self.keys[old]
        self.move_users_behind(writer.made, results)
        self.context.fuel.spend()
        self.context.count(self.fusion.name)
        return 1

    def write(self, writer: Writer, members: list[torch.fx.Node]) -> list[torch.fx.Node]:
        target, stacked = members[0].target, self.fusion.operands[members[0].target]
        arguments = [arguments_of(member) for member in members]
        stacks = [writer.call(aten.stack.default, [given[name] for given in arguments]) for name in stacked]
        # What is not stacked is equal for all; a fused operator of another kind leaves it to `finish`.
        others = {} if self.fusion.fused else {k: v for k, v in members[0].kwargs.items() if k not in stacked}
        whole = writer.call(self.fusion.fused or target, *stacks, **others)
        results = []
        for index, member in enumerate(members):
            before = len(writer.made)
            part = writer.call(aten.select.int, whole, 0, index)
            results.append(self.fusion.finish(writer, part, member, self.settings))
            for made in writer.made[before:]:
                inherit(made, member)
        return results

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


def shape_key(value: torch.Tensor) -> Hashable:
    """Equal only for shapes that are equal whatever the symbols in them are."""
    return tuple(size if isinstance(size, int) else torch_api.expression(size) for size in value.shape)


def operator_of(node: torch.fx.Node) -> Hashable:
    return node.target if node.op == "call_function" else node.op


def last_operand(members: Sequence[torch.fx.Node]) -> torch.fx.Node:
    return max(operand for member in members for operand in member.all_input_nodes)


def has_early_user(members: Sequence[torch.fx.Node]) -> bool:
    """Whether a value is read before all operands of all members are known."""
    last = last_operand(members)
    return any(user < last for member in members for user in member.users)


def inherit(made: torch.fx.Node, origin: torch.fx.Node) -> None:
    for key in INHERITED:
        if key in origin.meta:
            made.meta.setdefault(key, origin.meta[key])
