"""A rule: a name, what it does, when it may, an example on which it fires and one on which it must not.

Three kinds. A `Rule` is a pair of ordinary functions:

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
returns what replaces it, or why not. A `GraphRule` is for what must be found in a whole graph at once.

Both the guards of a rule and a node rule can ask for the options of the compile: `match.options`, `site.options`.

The new value has the strides of the old one, unless the rule says `layout="free"`: then they may differ where nobody
can tell, which the engine finds out.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ferrite.errors import Refusal
from ferrite.graph import Storage, fake_value
from ferrite.options import Options
from ferrite.pipeline import PassContext, Times, no_times
from ferrite.rewrite.arguments import arguments_of
from ferrite.rewrite.match import DEFAULTS, Match, Matcher
from ferrite.rewrite.pattern import Pattern, trace_pattern

Guard = Callable[[Match], Refusal | None]  # why not, or None
Layout = Literal["kept", "free"]
# Results to the bit; results that may be rounded otherwise; other random numbers of the same distribution.
Numerics = Literal["exact", "rounded", "redrawn"]


@dataclass(frozen=True)
class Case:
    """A function to trace and a maker of its inputs; `label` says what is special about it.

    `options` are those under which the case is one, where they are not the defaults.
    """

    label: str
    function: Callable[..., Any]
    make_inputs: Callable[[], list[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    name: str
    purpose: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    when: tuple[Guard, ...] = ()
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()
    layout: Layout = "kept"
    numerics: Numerics = "exact"

    @functools.cached_property
    def pattern(self) -> Pattern:
        return trace_pattern(self.before)

    @property
    def targets(self) -> tuple[Any, ...]:
        return (self.pattern.anchor.target,)

    def find(self, node: torch.fx.Node, counter: Counting, options: Options) -> Match | Refusal:
        """A match at this node that every guard accepts, or the first reason against it."""
        matcher = Matcher(self.pattern)
        found = matcher.match(node)
        counter.steps += matcher.steps
        if isinstance(found, Refusal):
            return found
        found.options = options
        for guard in self.when:
            refusal = guard(found)
            if refusal is not None:
                return refusal
        return found

    def build(self, match: Match, proxy: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Write the right side; one result per root."""
        result = self.after(**{name: proxy(value) for name, value in match.bindings.items()})
        return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class NodeRule:
    """`rewrite(site)` returns what replaces `site.node`, or a Refusal; it writes nodes through `site.call`.

    Where several nodes are replaced together, all or none, `roots(node)` says which they are, or why not; `rewrite`
    then returns a tuple, one value for each of `site.roots`.
    """

    name: str
    purpose: str
    targets: tuple[Any, ...]
    rewrite: Callable[[Site], Any]
    examples: tuple[Case, ...] = ()
    near_misses: tuple[Case, ...] = ()
    layout: Layout = "kept"
    numerics: Numerics = "exact"
    roots: Callable[[torch.fx.Node], Sequence[torch.fx.Node] | Refusal] | None = None


class GraphRule(abc.ABC):
    """What takes many candidates together, such as calls all over the graph that become one."""

    name: str
    purpose: str
    examples: tuple[Case, ...]
    near_misses: tuple[Case, ...]
    numerics: Numerics = "exact"

    @property
    @abc.abstractmethod
    def targets(self) -> tuple[Any, ...]:
        """The operators whose calls are candidates."""

    @abc.abstractmethod
    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        """Go over the whole graph once; how often it fired. It spends fuel, counts, and keeps the contracts itself."""

    @abc.abstractmethod
    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        """The first condition that failed at each candidate, None where it would fire; the graph stays as it is."""


def too_loose(rule: Rule | NodeRule | GraphRule, options: Options) -> Refusal | None:
    """Why a rule is not for users who want eager's very numbers."""
    if rule.numerics == "exact" or options.numerics == "relaxed":
        return None
    what = "may round otherwise" if rule.numerics == "rounded" else "draws other random numbers"
    return Refusal(f"it {what}, and the option numerics is strict")


LocalRule = Rule | NodeRule
AnyRule = LocalRule | GraphRule


@dataclass(frozen=True)
class Site:
    """One candidate node, with its arguments by name."""

    node: torch.fx.Node
    call: Callable[..., Any] = field(repr=False)
    options: Options = field(default=DEFAULTS, repr=False)
    seen: list[torch.fx.Node] = field(default_factory=list, repr=False)
    # makes a node that reads a new constant of the module, given the beginning of its name
    constant: Callable[[str, torch.Tensor], torch.fx.Node] | None = field(default=None, repr=False)
    written: frozenset[Storage] = field(default=frozenset(), repr=False)  # the memory that the graph writes
    is_inference: bool = False
    roots: tuple[torch.fx.Node, ...] = ()
    # what rules found out and keep for other sites of the graph, while they run over it
    answers: dict[Any, Any] = field(default_factory=dict, repr=False)
    times: Times = field(default=no_times, repr=False)  # of matrix products on the GPU of this process

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
