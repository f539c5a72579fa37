"""Functions that own one list of arguments; and the eager stand-in for a graph that could not be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Boxed = Callable[[list[Any]], Sequence[Any]]


def run_in_eager(gm: torch.fx.GraphModule) -> Boxed:
    """The graph itself, one node after the other, freeing values after their last use."""

    def run(args: list[Any]) -> Sequence[Any]:
        # an interpreter holds the values of one run: one each, since several threads may call
        interpreter = torch.fx.Interpreter(gm, garbage_collect_values=True)
        interpreter.extra_traceback = False  # it would be part of the message of an error, which is eager's
        outputs: Sequence[Any] = interpreter.boxed_run(args)
        return outputs

    return boxed(run)


def boxed(function: Boxed) -> Boxed:
    """Mark a function that takes ownership of one list of arguments, as AOTAutograd asks."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
