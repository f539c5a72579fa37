"""Random numbers that nobody reads still move the generator.

In eager, `torch.rand([])` whose result is dropped advances the random stream, and everything drawn later depends on
it. AOTAutograd removes such a call as dead code. So calls that draw random numbers and whose results lead nowhere are
made outputs of the captured graph, which keeps them, and the wrapper drops the extra outputs again:

    r = torch.rand([])                r = torch.rand([])
    return (x + 1,)           =>      return (x + 1, r)         # and [:1] of the result
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.capture.torch_operators import is_composite, overloads_of
from ferrite.graph import fake_value, is_barrier, leaving_no_symbols

Function = Callable[..., Any]


def keep_unused_random(gm: torch.fx.GraphModule) -> Callable[[Function], Function] | None:
    """Append unused random results to the outputs of `gm`, in place.

    Returns what takes them off a result again, or None if there were none, which is nearly always so.
    """
    unused = [node for node in dead_calls(gm.graph) if draws_random_numbers(node)]
    if not unused:
        return None
    output = gm.graph.output_node()
    results: Any = output.args[0]
    output.args = ((*results, *unused),)
    gm.recompile()
    count = len(results)

    def without_extra(function: Function) -> Function:
        def call(*args: Any) -> Any:
            return function(*args)[:count]

        return call

    return without_extra


def dead_calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Calls that do not lead to an output, in order.

    A call that only feeds a write to an input counts too. It would have stayed anyway; as an output it costs nothing
    but the reference.
    """
    dead: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op.startswith("call_") and all(user in dead for user in node.users):
            dead.add(node)
    return [node for node in graph.nodes if node in dead]


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """Whether any operator behind a call of torch's surface uses the generator: run it once on fake tensors.

    Numbers that data decides, as `x.nonzero()` and `x.item()` have, get names of their own in that run. Nothing of it
    stays, so no later reader may wait for the value that carries them.
    """
    fake_mode = torch_api.fake_mode_of(node.graph)
    if fake_mode is None or node.op == "call_module":
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (node.op == "call_method" or node.target is getattr(torch, name, None)) and never_draws(name):
        return False
    if fake_value(node) is None and is_barrier(node):
        return False  # it switches a mode, or may: trying it out would leave autocast on for all that follows
    watcher = RandomCallsMode()
    try:
        with fake_mode, torch.no_grad(), leaving_no_symbols(fake_mode):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), stand_in)
            with watcher:
                if node.op == "call_method":
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return False  # cannot be run alone; then it is left to the tracer as it is
    return watcher.seen


@functools.cache
def never_draws(name: str) -> bool:
    """Whether this is the name of ATen's operators alone that run as they are and do not use a generator.

    Saves the try, milliseconds for each parameter of an optimizer: a step is a graph of writes, which lead nowhere.
    """
    overloads, seeded = overloads_of(name), torch.Tag.nondeterministic_seeded
    return bool(overloads) and not any(seeded in each.tags or is_composite(each) for each in overloads)


def stand_in(node: torch.fx.Node) -> Any:
    """A copy of the fake value, since the call may write to it."""
    value = fake_value(node)
    return value.clone() if isinstance(value, torch.Tensor) else value


class RandomCallsMode(torch_api.DispatchMode):
    """Notices operators that draw from a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
