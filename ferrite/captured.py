"""What a stage of passes makes of a captured graph, through the cache: from an entry, or from the passes.

    rewritten        a graph of torch calls, by the pre-grad passes
    rewritten_joint  a graph of forward and backward, by the joint passes

The passes are deterministic: where the key is the same they would do the same again. An entry says what became of each
node and what each pass did, so that a record shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.capture.as_data import NoData
from ferrite.capture.edits import Before, make
from ferrite.collector import garbage_waits
from ferrite.graph import fake_value
from ferrite.graph.autocast import note_autocast
from ferrite.graph.facts import leaves
from ferrite.graph.order import users_in_order
from ferrite.graph.values import SYMBOLIC
from ferrite.options import Options
from ferrite.pipeline import PassRecord
from ferrite.runtime.cache import (
    Artifact,
    Built,
    Key,
    Outcome,
    Uncacheable,
    captured_key,
    joint_key,
    open_store,
    remember,
    source_digest,
)
from ferrite.runtime.entry_laws import check_rewritten

Passes = tuple[PassRecord, ...]
FROM_CACHE = "from the cache"


def rewritten(gm: torch.fx.GraphModule, options: Options, stage: Callable[[], Passes]) -> tuple[Passes, Outcome]:
    """Edit a graph as the passes do; what they did, and what the cache had. `stage` runs them."""
    passes, outcome = _Question(gm, options, stage, captured_key, "captured graph").answer()
    if outcome.result == "hit":
        note_autocast(gm)
    return passes, outcome


def rewritten_joint(gm: torch.fx.GraphModule, options: Options, stage: Callable[[], Passes]) -> tuple[Passes, Outcome]:
    found = _Question(gm, options, stage, joint_key, "joint graph").answer()
    users_in_order(gm.graph)
    return found


class _Question:
    def __init__(
        self,
        gm: torch.fx.GraphModule,
        options: Options,
        stage: Callable[[], Passes],
        make_key: Callable[..., Key],
        what: str,
    ) -> None:
        self.gm, self.options, self.stage, self.make_key, self.what = gm, options, stage, make_key, what
        self.store = open_store(options)
        self.has_key = False
        self.passes: Passes | None = None  # once they have run, or an entry was found

    def answer(self) -> tuple[Passes, Outcome]:
        with garbage_waits():
            return self._answer()

    def _answer(self) -> tuple[Passes, Outcome]:
        _artifact, outcome = remember(self.store, self.key, self.build, self.what, self.use_entry)
        assert self.passes is not None
        return self.passes, outcome

    def key(self) -> Key:
        try:
            key = self.make_key(self.gm, self.options, sources=source_digest(self.store))
        except Uncacheable:
            raise
        except Exception as problem:
            if self.options.strict:
                raise
            raise Uncacheable(f"no key could be made: {type(problem).__name__}: {problem}") from problem
        self.has_key = True
        return key

    def build(self) -> Built:
        if not self.has_key:
            self.passes = self.stage()
            return Built({}, {})
        before, symbolic = Before(self.gm), symbolic_in(self.gm)
        known = facts_of_symbols(symbolic)
        self.passes = self.stage()
        reason = reason_to_forget(self.passes, known, facts_of_symbols(symbolic))
        try:
            return Built({}, {"nodes": before.edits(self.gm), "passes": passes_data(self.passes)}, reason)
        except NoData as problem:
            return Built({}, {}, reason or str(problem))

    def use_entry(self, artifact: Artifact) -> None:
        """Edit the graph as an entry says; one that makes no sense leaves it as it was."""
        check_rewritten(artifact.metadata)
        passes = passes_from(artifact.metadata["passes"])
        make(self.gm, artifact.metadata["nodes"])
        self.passes = passes


def passes_data(passes: Passes) -> list[Any]:
    return [
        (each.name, dict(each.rewrites), each.nodes_before, each.nodes_after, each.note, dict(each.facts))
        for each in passes
    ]


def passes_from(data: Sequence[Any]) -> Passes:
    return tuple(
        PassRecord(name, 0.0, rewrites, before, after, note or FROM_CACHE, facts)
        for name, rewrites, before, after, note, facts in data
    )


# All that is known of symbols: the names of some, and what is said of them.
Facts = frozenset[tuple[frozenset[str], str]]


def reason_to_forget(passes: Passes, before: Facts, after: Facts) -> str:
    """Why an entry would not do what compiling did: the facts about sizes were others before."""
    if any(each.note.startswith("failed") for each in passes):
        return "a pass failed, which is to be seen again"
    symbols = {name for names, _text in before for name in names}
    if any(names & symbols for names, _text in after - before):
        return "compiling it decided something about its sizes"
    return ""


def facts_of_symbols(symbolic: Any) -> Facts:
    return frozenset() if symbolic is None else frozenset(size_facts.facts_of_symbols(symbolic))


def symbolic_in(gm: torch.fx.GraphModule) -> Any:
    """A number with symbols among the values of a graph or their sizes, which leads to what is known of them all."""
    for value in (leaf for node in gm.graph.nodes for leaf in leaves(fake_value(node))):
        for number in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(number, SYMBOLIC) and torch_api.expression(number).free_symbols:
                return number
    return None
