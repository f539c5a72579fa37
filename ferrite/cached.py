"""One graph through the cache: its code from an entry, or from the stages, which then leave one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ferrite import native
from ferrite.artifact import Compiled, as_entry, from_entry, with_passes
from ferrite.capture import CapturedGraph, torch_api, torch_operators
from ferrite.codegen.llvm.target import machine_text
from ferrite.compilation import Compilation
from ferrite.graph import fake_value
from ferrite.graph.facts import leaves
from ferrite.graph.places import Places
from ferrite.graph.values import SYMBOLIC
from ferrite.pipeline import PassRecord
from ferrite.runtime import Boxed
from ferrite.runtime.cache import (
    Artifact,
    Built,
    Key,
    Outcome,
    Uncacheable,
    graph_key,
    open_store,
    remember,
    source_digest,
)
from ferrite.runtime.kernels import KernelCache

# What is left to do with a graph: kernels with what they need, or a function where there are none.
Stages = Callable[[KernelCache | None], Compiled | Boxed]


def through_cache(
    graph: CapturedGraph, compilation: Compilation, passes: tuple[PassRecord, ...], first: str, stages: Stages
) -> Boxed:
    """The function of a graph. `passes`: what was done to it before; `first`: the stage that is next."""
    with compilation.stage("load"):  # less the time of the stages inside it
        return _Question(graph, compilation, passes, first, stages).answer()


class _Question:
    def __init__(
        self,
        graph: CapturedGraph,
        compilation: Compilation,
        passes: tuple[PassRecord, ...],
        first: str,
        stages: Stages,
    ) -> None:
        self.graph, self.compilation, self.passes, self.first, self.stages = graph, compilation, passes, first, stages
        self.store = open_store(compilation.options)
        self.places = Places(graph.gm)  # as it was captured: stages edit it
        self.objects: Any = None
        self.function: Boxed | None = None

    def answer(self) -> Boxed:
        artifact, outcome = self.ask()
        if outcome.result == "hit":
            try:
                return self.loaded(artifact, outcome)
            except Exception:  # whatever is wrong with an entry costs the entry
                assert self.store is not None
                assert outcome.key is not None
                self.store.discard(outcome.key)
                artifact, outcome = self.ask()
        if self.function is not None:
            self.compilation.record.cache.append(outcome)
            return self.function
        return self.loaded(artifact, outcome)

    def ask(self) -> tuple[Artifact, Outcome]:
        return remember(self.store, self.key, self.build, f"{self.graph.kind.value} graph")

    def key(self) -> Key:
        options = self.compilation.options
        try:
            return graph_key(
                self.graph, options, target=machine_text(), sources=self.sources, more={"first stage": self.first}
            )
        except Uncacheable:
            raise
        except Exception as problem:
            if options.strict:
                raise
            raise Uncacheable(f"no key could be made: {type(problem).__name__}: {problem}") from problem

    @functools.cached_property
    def sources(self) -> str:
        return source_digest(self.store)

    def build(self) -> Built:
        index, symbolic = self.places.index(), symbolic_in(self.graph)
        known = facts_of_symbols(symbolic)
        kernels = None if self.store is None else KernelCache(self.store, machine_text(), self.sources)
        found = self.stages(kernels)
        if not isinstance(found, Compiled):
            self.function = found
            return Built({}, {}, "it was not compiled to kernels")
        self.objects = found.objects
        built = as_entry(found, index)
        reason = built.reason or reason_to_forget(found, known, facts_of_symbols(symbolic))
        return Built(built.sections, built.metadata, reason)

    def loaded(self, artifact: Artifact, outcome: Outcome) -> Boxed:
        """One way for entries and for what was just built: what is kept is what runs."""
        compiled = with_passes(from_entry(artifact, self.places, self.objects, self.graph.kind.value), self.passes)
        function = native.load(compiled.code, compiled.objects)
        self.compilation.record.cache.append(outcome)
        self.compilation.record.add(compiled.record)
        return function


# All that is known of symbols: the names of some, and what is said of them.
Facts = frozenset[tuple[frozenset[str], str]]


def reason_to_forget(found: Compiled, before: Facts, after: Facts) -> str:
    """Why an entry would not do what compiling did: the facts about sizes were others before."""
    if any(each.note.startswith("failed") for each in found.record.passes):
        return "a pass failed, which is to be seen again"
    symbols = {name for names, _text in before for name in names}
    if any(names & symbols for names, _text in after - before):
        return "compiling it decided something about its sizes"
    return ""


def facts_of_symbols(symbolic: Any) -> Facts:
    return frozenset() if symbolic is None else frozenset(torch_operators.facts_of_symbols(symbolic))


def symbolic_in(graph: CapturedGraph) -> Any:
    """A number with symbols among the values of a graph or their sizes, which leads to what is known of them all."""
    for value in (leaf for node in graph.gm.graph.nodes for leaf in leaves(fake_value(node))):
        for number in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(number, SYMBOLIC) and torch_api.expression(number).free_symbols:
                return number
    return None
