"""Compiled code that holds parameters as constants, and notices when they are no longer those.

Each call is handed the parameters all the same. Before it runs, three facts about each are compared with what they
were: which object it is, its version (every write through torch counts it up), and where its memory lies. A write that
goes past torch (`.data`, numpy) shows in none of them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.runtime.boxed import Boxed, boxed

MAX_FROZEN_SETS = 8  # how many sets of parameters are frozen for one graph, one after the other or side by side

_version: Callable[[Any], int] = operator.attrgetter("_version")


class Frozen:
    """A function of the inputs that stay, and the tensors whose values it holds.

    Of tensors that were discarded nobody can ask more than which objects they are; nobody can write them either.
    """

    def __init__(
        self, function: Boxed, kept: Sequence[int], tensors: Mapping[int, torch.Tensor], discarded: bool = False
    ) -> None:
        self.function, self.kept, self.discarded = function, tuple(kept), discarded
        self.positions = tuple(tensors)
        self.identities = tuple(map(id, tensors.values()))
        self.facts = () if discarded else facts_of(tuple(tensors.values()))
        # The objects are not kept alive; an address that may be another's by now ends the freezing.
        self.gone: list[object] = []
        self.references = [weakref.ref(tensor, self.gone.append) for tensor in tensors.values()]

    def has_same_objects(self, args: Sequence[Any]) -> bool:
        return not self.gone and tuple([id(args[position]) for position in self.positions]) == self.identities

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the parameters among the arguments are those that were frozen, unchanged."""
        if not self.has_same_objects(args):
            return False
        return self.discarded or facts_of([args[position] for position in self.positions]) == self.facts


def facts_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_version, tensors)), tuple(map(torch.Tensor.data_ptr, tensors))


def call_frozen(first: Frozen, freeze: Callable[[list[Any]], Frozen], run_live: Callable[[], Boxed]) -> Boxed:
    """The function over all inputs. Where parameters are others, `freeze(args)` compiles for them; when that has been
    done often enough, `run_live()` gives what takes any."""
    remembered = [first]  # the one that was used last comes first
    made = 1
    live: Boxed | None = None
    lock = threading.Lock()

    def choose(args: list[Any]) -> Frozen | None:
        nonlocal remembered, made, live
        with lock:
            found = next((frozen for frozen in remembered if frozen.holds(args)), None)
            # what was changed in place will not come back
            others = [
                each for each in remembered if each is not found and not each.has_same_objects(args) and not each.gone
            ]
            if found is None and made < MAX_FROZEN_SETS:
                found, made = freeze(args), made + 1
            if found is None and live is None:
                live = run_live()
            remembered = [found, *others] if found is not None else others
            return found

    def call(args: list[Any]) -> Sequence[Any]:
        newest = remembered[0] if remembered else None
        frozen = newest if newest is not None and newest.holds(args) else choose(args)
        if frozen is None:
            assert live is not None
            return live(args)
        kept = [args[position] for position in frozen.kept]
        args.clear()
        return frozen.function(kept)

    return boxed(call)
