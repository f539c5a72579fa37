"""Which autocast is in force where in a graph of torch calls: there the same calls compute in other dtypes.

A graph as Dynamo captures it switches autocast on and off by calls of its own. Passes never add or move these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

# In the metadata of a module: the function that its graph calls to switch autocast on. Absent where it calls none, so
# that graphs without pay nothing.
SWITCH = "enters_autocast"


def note_autocast(gm: torch.fx.GraphModule) -> None:
    """Note on a module whether its graph switches autocast on; values inside are only true once that is noted."""
    gm.meta.pop(SWITCH, None)
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "_enter_autocast":
            gm.meta[SWITCH] = node.target
            return


@contextlib.contextmanager
def autocast_at(node: torch.fx.Node) -> Iterator[None]:
    """Autocast as the graph has it where a node stands."""
    with contextlib.ExitStack() as stack:
        for enter in opened_before(node):
            device, dtype, enabled, *_ = cast(tuple[Any, ...], enter.args)
            # What casts of fake weights give must not be remembered beyond this.
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        yield


def opened_before(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The calls that switched autocast on before a node and whose counterparts stand behind it, outermost first."""
    module = node.graph.owning_module
    switch = module.meta.get(SWITCH) if module is not None else None
    if switch is None:
        return []
    enters = node.graph.find_nodes(op="call_function", target=switch)
    return [enter for enter in enters if enter < node and not any(leave < node for leave in enter.users)]
