"""What a stage of passes made of a captured graph, as an entry of the cache, and back.

The passes are deterministic: where the key is the same they would do the same again. An entry says what became of each
node and what each pass did, so that a record shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ferrite.cache.codec import decode, encode
from ferrite.cache.entry import Artifact
from ferrite.cache.laws import check_passes, check_rows
from ferrite.cache.lookup import NewEntry
from ferrite.capture import Before, make, size_facts, torch_api
from ferrite.errors import NotCached, Refusal
from ferrite.graph import SYMBOLIC, fake_value, leaves
from ferrite.pipeline import PassRecord

Passes = tuple[PassRecord, ...]
FROM_CACHE = "from the cache"


class KnownSizes:
    """What is known of the sizes in a graph before it is compiled."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.symbolic = symbolic_in(gm)
        self.facts = facts_of_symbols(self.symbolic)

    def reason_to_forget(self, passes: Passes) -> Refusal | None:
        """Why an entry would not do what compiling did: it found out something, or went wrong."""
        return reason_to_forget(passes, self.facts, facts_of_symbols(self.symbolic))


class BeforePasses:
    """A graph as it is before a stage of passes edits it: what an entry says is the difference."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm, self.before, self.sizes_before = gm, Before(gm), KnownSizes(gm)

    def entry(self, passes: Passes) -> NewEntry:
        """What became of the graph. `passes`: what they say they did."""
        refusal = self.sizes_before.reason_to_forget(passes)
        try:
            return NewEntry({}, {"nodes": self.before.edits(self.gm), "passes": passes_data(passes)}, refusal)
        except NotCached as refused:
            return NewEntry({}, {}, refusal or refused.refusal)


def edit_as(gm: torch.fx.GraphModule, artifact: Artifact) -> Passes:
    """Edit a graph as an entry says; one that makes no sense leaves it as it was. What the passes did then."""
    passes = decode(Passes, artifact.metadata["passes"])
    check_passes(passes)
    check_rows(artifact.metadata["nodes"])
    make(gm, artifact.metadata["nodes"])
    return tuple(replace(each, note=each.note or FROM_CACHE) for each in passes)


def passes_data(passes: Passes) -> Any:
    return encode(Passes, passes)


# All that is known of symbols: the names of some, and what is said of them.
Facts = frozenset[tuple[frozenset[str], str]]


def reason_to_forget(passes: Passes, before: Facts, after: Facts) -> Refusal | None:
    """Why an entry would not do what compiling did: the facts about sizes were others before."""
    if any(each.note.startswith("failed") for each in passes):
        return Refusal("a pass failed, which is to be seen again")
    symbols = {name for names, _text in before for name in names}
    if any(names & symbols for names, _text in after - before):
        return Refusal("compiling it decided something about its sizes")
    return None


def facts_of_symbols(symbolic: Any) -> Facts:
    return frozenset() if symbolic is None else frozenset(size_facts.facts_of_symbols(symbolic))


def symbolic_in(gm: torch.fx.GraphModule) -> Any:
    """A number with symbols among the values of a graph or their sizes, which leads to what is known of them all."""
    for value in (leaf for node in gm.graph.nodes for leaf in leaves(fake_value(node))):
        for number in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(number, SYMBOLIC) and torch_api.expression(number).free_symbols:
                return number
    return None
