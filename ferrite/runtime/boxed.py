"""Functions that own one list of arguments; and the eager stand-in for a graph that could not be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture import torch_runtime

Boxed = Callable[[list[Any]], Sequence[Any]]


class EagerRun(torch.fx.Interpreter):
    """Checkpoints on a GPU that is not the current one draw from the generator of that one, as in eager."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_runtime.is_drawn_again(target):
            return torch_runtime.on_the_gpu_of_its_operands(target)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def run_in_eager(gm: torch.fx.GraphModule) -> Boxed:
    """The graph itself, one node after the other, freeing values after their last use."""

    def run(args: list[Any]) -> Sequence[Any]:
        # an interpreter holds the values of one run: one each, since several threads may call
        interpreter = EagerRun(gm, garbage_collect_values=True)
        interpreter.extra_traceback = False  # it would be part of the message of an error, which is eager's
        outputs: Sequence[Any] = interpreter.boxed_run(args)
        return outputs

    return boxed(run)


def boxed(function: Boxed) -> Boxed:
    """Mark a function that takes ownership of one list of arguments, as AOTAutograd asks."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
