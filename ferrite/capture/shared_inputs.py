"""Inputs that share memory, one of which is written: what is compiled is for where they lay in it.

AOTAutograd hands such inputs to a graph as one tensor, and the graph takes them out of it at the offsets that they had
when it was traced. Dynamo guards sizes and strides, but neither offsets nor which inputs share memory:

    step(base[:4], base[2:6])            # compiled for these; `step` writes both
    step(base[:4], base[4:8])            # would be computed for the elements above
    step(one, other)                     # would be computed outside of `one`

So a call whose inputs lie otherwise runs in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture.written_inputs import shared_by_inputs, storages, written_inputs
from ferrite.errors import warn_user
from ferrite.graph import fake_value

Function = Callable[..., Any]


def where_inputs_lay(gm: torch.fx.GraphModule, in_eager: Function) -> Callable[[Function], Function] | None:
    """What sends calls to `in_eager` whose inputs lie otherwise than those of `gm`; None if no memory is shared and
    written, which is nearly always so."""
    shared = shared_by_inputs(gm.graph)
    if not shared or not (shared := shared & written_inputs(gm.graph)):
        return None
    inputs = gm.graph.find_nodes(op="placeholder")
    sharing = [position for position, node in enumerate(inputs) if shared & storages(node)]
    members = [position for position in sharing if isinstance(fake_value(inputs[position]), torch.Tensor)]
    traced = places([fake_value(inputs[position]) for position in members])
    warned: list[bool] = []

    def where_they_lay(compiled: Function) -> Function:
        def call(*args: Any) -> Any:
            now = places([args[position] for position in members])
            if all(one == other or isinstance(one, torch.SymInt) for one, other in zip(traced, now, strict=True)):
                return compiled(*args)
            if not warned:
                warned.append(True)
                warn_user(
                    "ferrite: inputs that share memory lie otherwise in it than when this graph was compiled, and one "
                    "of them is written: such calls run in eager"
                )
            return in_eager(*args)

        return call

    return where_they_lay


def places(tensors: Sequence[torch.Tensor]) -> list[int | torch.SymInt | None]:
    """For each tensor the number of its memory, by first sight, where it begins in it, and how large what it is a view
    of is: of that AOTAutograd makes the one tensor."""
    numbers: dict[int, int] = {}
    found: list[int | torch.SymInt | None] = []
    for tensor in tensors:
        memory, base = tensor.untyped_storage(), tensor._base
        found += [numbers.setdefault(memory._cdata, len(numbers)), tensor.storage_offset()]
        found += [memory.nbytes(), None] if base is None else [base.numel(), base.storage_offset()]
    return found
