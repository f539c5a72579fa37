"""A rule: a name, what it does, when it may, an example on which it fires and one on which it must not.

Two kinds. A `Rule` is a pair of ordinary functions:

    Rule(
        name="addmm",
        purpose="add(mm(a, b), bias) is one addmm",
        before=lambda a, b, bias: aten.add.Tensor(aten.mm.default(a, b), bias),
        after=lambda a, b, bias: aten.addmm.default(bias, a, b),
        when=(bias_is_a_row,),
        ...
    )

`before` is traced once. `after` runs at each match: variables bound to nodes arrive as proxies, so that calling
operators on them writes nodes; variables bound to numbers, lists and dtypes arrive as they are, so that ordinary
Python can compute with them.

A `NodeRule` is for what no fixed shape describes (lists of any length, chains): a function of one candidate node that
returns what replaces it, or why not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.graph import fake_value
from ferrite.rewrite.arguments import arguments_of
from ferrite.rewrite.match import Match, Matcher, Refusal
from ferrite.rewrite.pattern import Pattern, trace_pattern

Guard = Callable[[Match], str | None]  # why not, or None


@dataclass(frozen=True)
class Case:
    """A function to trace and a maker of its inputs; `label` says what is special about it."""

    label: str
    function: Callable[..., Any]
    make_inputs: Callable[[], list[Any]]


@dataclass(frozen=True)
class Rule:
    name: str
    purpose: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    when: tuple[Guard, ...] = ()
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()

    @functools.cached_property
    def pattern(self) -> Pattern:
        return trace_pattern(self.before)

    @property
    def targets(self) -> tuple[Any, ...]:
        return (self.pattern.anchor.target,)

    def find(self, node: torch.fx.Node, counter: Counting) -> Match | Refusal:
        """A match at this node that every guard accepts, or the first reason against it."""
        matcher = Matcher(self.pattern)
        found = matcher.match(node)
        counter.steps += matcher.steps
        if isinstance(found, Refusal):
            return found
        for guard in self.when:
            reason = guard(found)
            if reason is not None:
                return Refusal(reason)
        return found

    def build(self, match: Match, proxy: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Write the right side; one result per root."""
        result = self.after(**{name: proxy(value) for name, value in match.bindings.items()})
        return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class NodeRule:
    """`rewrite(site)` returns what replaces `site.node`, or a Refusal; it writes nodes through `site.call`."""

    name: str
    purpose: str
    targets: tuple[Any, ...]
    rewrite: Callable[[Site], Any]
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Site:
    """One candidate node, with its arguments by name."""

    node: torch.fx.Node
    call: Callable[..., Any] = field(repr=False)
    seen: list[torch.fx.Node] = field(default_factory=list, repr=False)

    def through(self, *nodes: torch.fx.Node) -> None:
        """Say which nodes before this one the rewrite makes unnecessary: what they read is now read here.

        The engine demands that no write lies between, and erases those that nobody reads any more.
        """
        self.seen.extend(nodes)

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        return arguments_of(self.node)

    def value(self, item: Any) -> Any:
        return fake_value(item) if isinstance(item, torch.fx.Node) else item


class Counting:
    """Steps spent on matching: cost without a clock."""

    steps: int = 0
