"""One backend in the place of another, for code that names its backend itself.

Everything that means Inductor ends in one function, `compile_fx` of torch's compiler: torch.compile without a backend,
the name "inductor" with any mode and options, `torch._dynamo.optimize("inductor")`, and the function itself given as
the backend. It is exchanged before a test file is imported, so that the file takes the other for it; modes and options
are checked by torch, as the file may expect, and go no farther. A call that hands `compile_fx` parts of Inductor is
a test of those parts and gets the original.

Backends that the registry knows are exchanged by name, where asked; "counters" means the counting and recording
backends of `torch._dynamo.testing`, which run what they were given without compiling it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Backend = Callable[..., Any]
COUNTERS = "counters"
RECORDERS = ("CompileCounter", "EagerAndRecordGraphs")
OF_INDUCTOR = ("inner_compile", "decompositions", "ignore_shape_env", "get_decomp_fn")


class Swap:
    """What took the place of the backends, and how many graphs it and Inductor were given since `begin`."""

    def __init__(self, name: str) -> None:
        import torch._dynamo.backends.registry as registry

        self.backend: Backend = registry.lookup_backend(name)
        self.graphs = 0
        self.by_inductor = 0

    def begin(self) -> None:
        self.graphs = self.by_inductor = 0

    def compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs)

    def install(self, replaced: Sequence[str]) -> None:
        """Take the place of Inductor and of these backends, in this process."""
        self.instead_of_inductor()
        for name in replaced:
            if name == COUNTERS:
                for recorder in RECORDERS:
                    self.behind(recorder)
            elif name != "inductor":  # its entry calls compile_fx
                self.instead_of(name)

    def instead_of_inductor(self) -> None:
        import torch._inductor.compile_fx as home

        original = home.compile_fx

        @functools.wraps(original)
        def compile_fx(gm: torch.fx.GraphModule, inputs: Sequence[Any], *rest: Any, **settings: Any) -> Any:
            if rest or any(settings.get(name) is not None for name in OF_INDUCTOR):
                self.by_inductor += 1
                return original(gm, inputs, *rest, **settings)
            return self.compile(gm, inputs)

        home.compile_fx = compile_fx

    def instead_of(self, name: str) -> None:
        import torch._dynamo.backends.registry as registry

        registry.lookup_backend(name)  # an unknown name is an error here and not in every test

        def other(gm: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
            return self.compile(gm, inputs)

        other._tags = ()  # type: ignore[attr-defined]
        registry._COMPILER_FNS[name] = other

    def behind(self, recorder: str) -> None:
        """A backend that records a graph compiles it, too: a copy, since the test looks at the graph later."""
        import torch._dynamo.testing as testing

        kind = getattr(testing, recorder)
        record = kind.__call__

        @functools.wraps(record)
        def recorded(this: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            record(this, gm, inputs)
            return self.compile(another(gm), inputs)

        kind.__call__ = recorded


def another(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module with the same parameters and a graph of its own, as have the graphs it calls."""
    found = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    found.meta = dict(gm.meta)
    for name, inner in list(found.named_children()):
        if isinstance(inner, torch.fx.GraphModule):
            setattr(found, name, another(inner))
    return found
