"""A graph that is compiled with its parameters as constants, and again for others if they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferrite.capture import CapturedGraph, Parameter, torch_state
from ferrite.errors import UserError, layout
from ferrite.graph import ModelLine
from ferrite.pipeline import warn_at
from ferrite.runtime.boxed import Boxed, run_in_eager
from ferrite.runtime.discard import discard
from ferrite.runtime.frozen import MAX_FROZEN_SETS, Frozen


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
