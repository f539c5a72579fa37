"""Users' own callables on a graph: written for other compilers' hooks, they work here unchanged.

A hook is a callable on the graph, or an object with `__call__` and `uuid()`, or a list of them. One that also takes
`is_inference` is told. Nodes that a hook leaves out of order or without metadata are repaired; one that breaks the
graph, or returns another one, is taken back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ferrite.pipeline import GraphPass, PassContext, StageName, graph_pass


def run_hooks(hooks: tuple[Any, ...], gm: torch.fx.GraphModule, context: PassContext) -> int | None:
    """None, for a change nobody counted, if there are hooks; 0 without any."""
    if hooks:
        gm.recompile()  # they may run the graph
    for hook in hooks:
        told = {"is_inference": context.is_inference} if wants_to_know(hook) else {}
        returned = hook(gm.graph, **told)
        if isinstance(returned, (torch.fx.Graph, torch.fx.GraphModule)) and returned not in (gm, gm.graph):
            raise TypeError("a hook returned another graph, which nobody would read: edit the one that it is given")
    return None if hooks else 0


def hook_pass(stage: StageName, option: str) -> GraphPass:
    """The pass at which a stage runs the callables that an option holds; it has the name of the option."""

    def run(gm: torch.fx.GraphModule, context: PassContext) -> int | None:
        return run_hooks(getattr(context.options, option), gm, context)

    run.__doc__ = f"The callables of the option {option}."
    made: GraphPass = graph_pass(run, stage=stage, name=option)
    return made


def wants_to_know(hook: Callable[..., Any]) -> bool:
    try:
        return "is_inference" in inspect.signature(hook).parameters
    except (TypeError, ValueError):
        return False
