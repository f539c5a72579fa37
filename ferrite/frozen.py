"""Compile an inference graph with its parameters as constants, again for others if they change.

The graph as it was captured is kept beside the compiled code: compiling for new parameters starts from it, without
Dynamo and AOTAutograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ferrite.capture import CapturedGraph, torch_state
from ferrite.capture.parameters import Parameter
from ferrite.compilation import Compilation
from ferrite.debug.dump import Dump
from ferrite.errors import UserError, layout
from ferrite.graph import fake_value, storage_bytes
from ferrite.passes import FREEZE, Inlined, inline_parameters
from ferrite.pipeline import PassRecord
from ferrite.pipeline.report import warn_at
from ferrite.runtime import Boxed, Frozen, call_frozen, discard, run_in_eager
from ferrite.runtime.frozen import MOST

# The stages behind freezing; what was done to the graph so far comes last.
Finish = Callable[[CapturedGraph, Compilation, Dump, tuple[PassRecord, ...]], Boxed]


class Freezer:
    """One graph with parameters, and how to compile it for some of them."""

    def __init__(
        self, graph: CapturedGraph, compilation: Compilation, passes: tuple[PassRecord, ...], finish: Finish
    ) -> None:
        self.compilation, self.passes, self.finish = compilation, passes, finish
        # The parameters themselves come with every call; they are not kept alive here.
        self.graph = replace(graph, parameters={})
        self.origins = {at: (parameter.path, parameter.source) for at, parameter in graph.parameters.items()}
        self.discards = compilation.options.freeze_discard_parameters

    def freeze(self, graph: CapturedGraph, dump: Dump) -> Frozen:
        with self.compilation.stage("freeze"):
            start = time.perf_counter()
            inlined = inline_parameters(graph)
            made = record_of(graph, inlined, time.perf_counter() - start)
            done = self.compilation.rewrite(FREEZE, inlined.graph, dump)
        function = self.finish(inlined.graph, self.compilation, dump, (*self.passes, made, *done))
        tensors = {position: parameter.tensor for position, parameter in inlined.frozen.items()}
        if self.discards:
            let_go(inlined)
        return Frozen(function, inlined.kept, tensors, self.discards)

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
        graph = replace(self.graph, parameters=parameters)
        unfrozen = Frozen(run_in_eager(self.graph.gm), range(len(args)), {})
        with torch_state.on_real_tensors():
            return self.compilation.attempt_graph(graph, lambda: self.freeze(graph, self.dump()), otherwise=unfrozen)

    def run_live(self) -> Boxed:
        """Compile the graph with its parameters as inputs."""
        facts = {
            "because": f"the parameters were others than before in {MOST} calls",
            "what happens": "from now on parameters that are not known yet are read in every call",
            "to change that": "compile without the option freeze",
        }
        warn_at(self.compilation.record.line, layout("ferrite: a frozen model changes too often", facts))

        def work() -> Boxed:
            return self.finish(self.graph, self.compilation, self.dump(), self.passes)

        with torch_state.on_real_tensors():
            return self.compilation.attempt_graph(self.graph, work, otherwise=run_in_eager(self.graph.gm))

    def dump(self) -> Dump:
        return Dump(self.compilation.dump_folder, self.graph.kind.value)


def compile_frozen(
    graph: CapturedGraph, compilation: Compilation, dump: Dump, passes: tuple[PassRecord, ...], finish: Finish
) -> Boxed:
    """The function over all inputs of the graph, parameters too."""
    freezer = Freezer(graph, compilation, passes, finish)
    first = freezer.freeze(graph, dump)
    return call_frozen(first, freezer.freeze_again, freezer.run_live)


def record_of(graph: CapturedGraph, inlined: Inlined, seconds: float) -> PassRecord:
    """What became constant, as a pass of the stage."""
    before, after = len(graph.gm.graph.nodes), len(inlined.graph.gm.graph.nodes)
    placeholders = graph.gm.graph.find_nodes(op="placeholder")
    size = sum(int(storage_bytes(fake_value(placeholders[position]))) for position in inlined.frozen)
    name, count = "inline_parameters", len(inlined.frozen)
    return PassRecord(name, seconds, {name: count}, before, after, facts={"parameters": count, "bytes": size})


def let_go(inlined: Inlined) -> None:
    """Take the contents from the user's own parameters; Dynamo is not to look at them any more."""
    owned = [parameter for parameter in inlined.frozen.values() if parameter.source is not None]
    torch_state.forget_guards([parameter.source for parameter in owned])
    with torch_state.on_real_tensors():
        for parameter in owned:
            discard(parameter.tensor, str(parameter))
