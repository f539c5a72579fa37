"""Find a pattern in a graph. Matching never changes the graph, and a failed match says why.

What the matcher demands of every rule, so that no rule can forget it: arguments that the pattern does not mention hold
their defaults; equal variables bind equal values; a value inside the pattern is read by the pattern only, as often as
the pattern reads it; all matched nodes lie in one mutation region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import Options
from ferrite.rewrite.arguments import MISSING, arguments_of, same_literal
from ferrite.rewrite.pattern import Items, Pattern, PatternCall, PatternLiteral, Variable, count_uses

DEFAULTS = Options()

# Two tensor operands that may be swapped: the matcher tries both orders.
COMMUTATIVE = {
    torch.ops.aten.add.Tensor: ("self", "other"),
    torch.ops.aten.mul.Tensor: ("self", "other"),
    torch.ops.aten.maximum.default: ("self", "other"),
    torch.ops.aten.minimum.default: ("self", "other"),
    torch.ops.aten.bitwise_and.Tensor: ("self", "other"),
    torch.ops.aten.bitwise_or.Tensor: ("self", "other"),
    torch.ops.aten.logical_and.default: ("self", "other"),
    torch.ops.aten.logical_or.default: ("self", "other"),
}


@dataclass
class Match:
    """Where a pattern was found: what its variables are bound to, and which node each of its calls is."""

    pattern: Pattern
    bindings: dict[str, Any] = field(default_factory=dict)
    nodes: dict[int, torch.fx.Node] = field(default_factory=dict)
    options: Options = DEFAULTS  # of the compile

    def __getitem__(self, variable: str) -> Any:
        return self.bindings[variable]

    @property
    def roots(self) -> tuple[torch.fx.Node, ...]:
        return tuple(self.nodes[call.index] for call in self.pattern.roots)

    def value(self, variable: str) -> Any:
        """What a variable is bound to, as a value: the fake tensor or symbol of a node, or the literal itself."""
        bound = self.bindings[variable]
        return fake_value(bound) if isinstance(bound, torch.fx.Node) else bound

    def copy(self) -> Match:
        return Match(self.pattern, dict(self.bindings), dict(self.nodes), self.options)


class Matcher:
    """Matches one pattern; counts its steps, so that cost can be tested without a clock."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.steps = 0
        self.refusal = Refusal("the operators differ")

    def match(self, node: torch.fx.Node) -> Match | Refusal:
        """Match the anchor at a node, then find the other roots among the users of what is bound."""
        self.refusal = Refusal("the operators differ")
        for found in self.call(self.pattern.anchor, node, Match(self.pattern)):
            for complete in self.other_roots(found):
                problem = self.interior_problem(complete)
                if problem is None:
                    return complete
                self.refusal = problem
        return self.refusal

    def call(self, pattern: PatternCall, node: torch.fx.Node, match: Match) -> Iterator[Match]:
        """Every way in which a call of the pattern can be this node."""
        self.steps += 1
        known = match.nodes.get(pattern.index)
        if known is not None:
            if known is node:
                yield match
            return
        if node.op != "call_function" or node.target is not pattern.target:
            self.refusal = Refusal(f"{node.name} is no {pattern.target}")
            return
        if node in match.nodes.values():
            return
        for expected in self.orders(pattern):
            own = match.copy()
            own.nodes[pattern.index] = node
            yield from self.arguments(expected, arguments_of(node), own, node)

    def orders(self, pattern: PatternCall) -> Iterator[dict[str, Any]]:
        expected = dict(pattern.arguments)
        yield expected
        swapped = COMMUTATIVE.get(pattern.target)
        if swapped is not None and expected[swapped[0]] != expected[swapped[1]]:
            left, right = swapped
            yield {**expected, left: expected[right], right: expected[left]}

    def arguments(
        self, expected: dict[str, Any], actual: dict[str, Any], match: Match, node: torch.fx.Node
    ) -> Iterator[Match]:
        if expected.keys() != actual.keys():
            self.refusal = Refusal(f"{node.name} has other arguments")
            return
        # plain arguments first: they fail fast, calls recurse
        names = sorted(expected, key=lambda name: isinstance(expected[name], PatternCall))
        yield from self.all_of([(expected[name], actual[name], f"{node.name}.{name}") for name in names], match)

    def all_of(self, pairs: list[tuple[Any, Any, str]], match: Match) -> Iterator[Match]:
        if not pairs:
            yield match
            return
        (pattern, actual, where), *rest = pairs
        for found in self.argument(pattern, actual, where, match):
            yield from self.all_of(rest, found)

    def argument(self, pattern: Any, actual: Any, where: str, match: Match) -> Iterator[Match]:
        self.steps += 1
        match pattern:
            case Variable(name):
                if actual is MISSING:
                    return
                if name not in match.bindings:
                    own = match.copy()
                    own.bindings[name] = actual
                    yield own
                elif same_argument(match.bindings[name], actual):
                    yield match
                else:
                    self.refusal = Refusal(f"{where} is {actual}, but {name} is {match.bindings[name]} already")
            case PatternCall():
                if isinstance(actual, torch.fx.Node):
                    yield from self.call(pattern, actual, match)
                else:
                    self.refusal = Refusal(f"{where} is {actual!r}, not a {pattern.target}")
            case Items(items):
                if isinstance(actual, (list, tuple)) and len(actual) == len(items):
                    yield from self.all_of(list(zip(items, actual, [where] * len(items), strict=True)), match)
                else:
                    self.refusal = Refusal(f"{where} has another length")
            case PatternLiteral(value):
                if same_literal(value, actual):
                    yield match
                else:
                    self.refusal = Refusal(f"{where} is {actual!r} instead of {value!r}")

    def other_roots(self, match: Match) -> Iterator[Match]:
        """Bind roots that do not lead to the anchor: users of values that are bound already."""
        missing = next((call for call in self.pattern.roots if call.index not in match.nodes), None)
        if missing is None:
            yield match
            return
        self.refusal = Refusal(f"there is no {missing.target} beside {match.nodes[self.pattern.anchor.index].name}")
        for candidate in self.neighbours(missing, match):
            for found in self.call(missing, candidate, match):
                yield from self.other_roots(found)

    def neighbours(self, pattern: PatternCall, match: Match) -> Iterator[torch.fx.Node]:
        seen: set[torch.fx.Node] = set()
        for _, argument in pattern.arguments:
            bound: Any = None
            if isinstance(argument, PatternCall):
                bound = match.nodes.get(argument.index)
            elif isinstance(argument, Variable):
                bound = match.bindings.get(argument.name)
            for user in bound.users if isinstance(bound, torch.fx.Node) else ():
                if user not in seen:
                    seen.add(user)
                    yield user

    def interior_problem(self, match: Match) -> Refusal | None:
        """A value inside the pattern that somebody else reads too would have to be kept: nothing is gained."""
        roots = {call.index for call in self.pattern.roots}
        for call in self.pattern.calls:
            if call.index in roots:
                continue
            node = match.nodes[call.index]
            uses = sum(count_uses(user, node) for user in node.users)
            if uses != call.uses:
                return Refusal(f"{node.name} has {uses} uses, the pattern has {call.uses}")
        return None


def same_argument(left: Any, right: Any) -> bool:
    if isinstance(left, torch.fx.Node) or isinstance(right, torch.fx.Node):
        return left is right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_argument, left, right))
    return same_literal(left, right)
