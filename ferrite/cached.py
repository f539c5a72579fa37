"""One graph through the cache: its code from an entry, or from the stages, which then leave one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ferrite import native
from ferrite.artifact import Compiled, as_entry, from_entry, with_passes
from ferrite.capture import CapturedGraph
from ferrite.captured import facts_of_symbols, reason_to_forget, symbolic_in
from ferrite.codegen.llvm.target import machine_text
from ferrite.compilation import Compilation
from ferrite.debug.record import GraphRecord
from ferrite.graph.places import Places
from ferrite.pipeline import PassRecord
from ferrite.runtime import Boxed
from ferrite.runtime.cache import (
    Artifact,
    Built,
    Key,
    Uncacheable,
    graph_key,
    open_store,
    remember,
    source_digest,
)
from ferrite.runtime.entry_laws import check_graph
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
        self.record: GraphRecord | None = None

    def answer(self) -> Boxed:
        what = f"{self.graph.kind.value} graph"
        artifact, outcome = remember(self.store, self.key, self.build, what, self.use_entry)
        if self.function is None:
            self.use(artifact)
        self.compilation.record.cache.append(outcome)
        if self.record is not None:
            self.compilation.record.add(self.record)
        assert self.function is not None
        return self.function

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
        index, symbolic = self.places.index(), symbolic_in(self.graph.gm)
        known = facts_of_symbols(symbolic)
        kernels = None if self.store is None else KernelCache(self.store, machine_text(), self.sources)
        found = self.stages(kernels)
        if not isinstance(found, Compiled):
            self.function = found
            return Built({}, {}, "it was not compiled to kernels")
        self.objects = found.objects
        built = as_entry(found, index)
        reason = built.reason or reason_to_forget(found.record.passes, known, facts_of_symbols(symbolic))
        return Built(built.sections, built.metadata, reason, "; ".join(kernels.problems if kernels is not None else ()))

    def use_entry(self, artifact: Artifact) -> None:
        check_graph(artifact.metadata, artifact.sections, len(self.places.nodes))
        self.use(artifact)

    def use(self, artifact: Artifact) -> None:
        """One way for entries and for what was just built: what is kept is what runs."""
        compiled = with_passes(from_entry(artifact, self.places, self.objects, self.graph.kind.value), self.passes)
        self.function, self.record = native.load(compiled.code, compiled.objects), compiled.record
