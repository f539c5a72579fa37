"""Compiled code that holds parameters as constants, notices when they are no longer those, and is compiled again then.

Each call is handed the parameters all the same. Before it runs, three facts about each are compared with what they
were: which object it is, its version (every write through torch counts it up), and where its memory lies. A write that
goes past torch (`.data`, numpy) shows in none of them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite.capture import CapturedGraph, Parameter, torch_state
from ferrite.errors import UserError, layout
from ferrite.graph import ModelLine
from ferrite.pipeline import warn_at
from ferrite.runtime.boxed import Boxed, boxed, run_in_eager
from ferrite.runtime.discard import discard

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


class Freezer:
    """One graph with parameters. `freeze_for`: compiles it for those that a graph comes with, or gives what it is told
    to give where that fails. `compile_live`: compiles it with parameters as inputs. `discards`: the user's own are not
    needed any more once they are frozen."""

    def __init__(
        self,
        graph: CapturedGraph,
        freeze_for: Callable[[CapturedGraph, Frozen], Frozen],
        compile_live: Callable[[CapturedGraph], Boxed],
        line: ModelLine | None,
        discards: bool,
    ) -> None:
        self.freeze_for, self.compile_live, self.line, self.discards = freeze_for, compile_live, line, discards
        # The parameters themselves come with every call; they are not kept alive here.
        self.graph = replace(graph, parameters={})
        self.origins = {at: (parameter.path, parameter.source) for at, parameter in graph.parameters.items()}

    def frozen(self, function: Boxed, kept: Sequence[int], parameters: Mapping[int, Parameter]) -> Frozen:
        """A function that holds parameters, by their old positions, as one that notices if they change."""
        tensors = {position: parameter.tensor for position, parameter in parameters.items()}
        if self.discards:
            let_go(parameters.values())
        return Frozen(function, kept, tensors, self.discards)

    def freeze_again(self, args: list[Any]) -> Frozen:
        """For the parameters among the arguments of a call."""
        if self.discards:
            raise UserError(
                "a frozen model was called with other parameters than it was frozen with",
                {
                    "because": "the others were discarded, so it cannot be compiled again",
                    "to change that": "load the model anew, or freeze it without the option freeze_discard_parameters",
                },
            )
        parameters = {at: Parameter(path, args[at], source) for at, (path, source) in self.origins.items()}
        unfrozen = Frozen(run_in_eager(self.graph.gm), range(len(args)), {})
        with torch_state.on_real_tensors():
            return self.freeze_for(replace(self.graph, parameters=parameters), unfrozen)

    def run_live(self) -> Boxed:
        """Once parameters have changed too often."""
        facts = {
            "because": f"the parameters were others than before in {MAX_FROZEN_SETS} calls",
            "what happens": "from now on parameters that are not known yet are read in every call",
            "to change that": "compile without the option freeze",
        }
        warn_at(self.line, layout("ferrite: a frozen model changes too often", facts))
        with torch_state.on_real_tensors():
            return self.compile_live(self.graph)


def let_go(parameters: Iterable[Parameter]) -> None:
    """Take the contents from the user's own parameters; Dynamo is not to look at them any more."""
    owned = [parameter for parameter in parameters if parameter.source is not None]
    torch_state.forget_guards([parameter.source for parameter in owned])
    with torch_state.on_real_tensors():
        for parameter in owned:
            discard(parameter.tensor, str(parameter))
