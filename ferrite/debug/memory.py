"""The memory that a graph needs: as it was planned, and as eager would need it, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ferrite.capture import torch_api
from ferrite.debug.record import PeakMemory
from ferrite.graph import Storage, fake_value, leaves, storages_of, tensor_storages
from ferrite.schedule import Plan, peak_of

GIVEN = ("placeholder", "get_attr")


def memory_record(gm: torch.fx.GraphModule, plan: Plan) -> PeakMemory:
    return PeakMemory(peak_of(plan, hints_of(gm)), eager_peak(gm))


def hints_of(gm: torch.fx.GraphModule) -> dict[str, int]:
    """Likely values of the symbols that inputs bring."""
    found: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        for value in leaves(fake_value(node)):
            numbers = (*value.shape, *value.stride()) if is_strided(value) else (value,)
            for number in numbers:
                name = torch_api.bare_symbol(number)
                if name is not None and torch_api.has_hint(number):
                    found[name] = torch_api.size_hint(number)
    return found


def eager_peak(gm: torch.fx.GraphModule) -> int | None:
    """The most bytes that the results of operators take at once, each freed after its last use; None where sizes are
    known only when it runs."""
    nodes = list(gm.graph.nodes)
    storages = {node: storages_of(node) for node in nodes}
    last: dict[Storage, int] = {}
    for place, node in enumerate(nodes):
        for storage in storages[node].union(*(storages[operand] for operand in node.all_input_nodes)):
            last[storage] = place
    ending: dict[int, list[Storage]] = {}
    for storage, place in last.items():
        ending.setdefault(place, []).append(storage)
    given: set[Storage] = set()
    alive: dict[Storage, int] = {}
    held = peak = 0
    for place, node in enumerate(nodes):
        if node.op in GIVEN:
            given |= storages[node]
            continue
        for storage, size in made_by(node):
            if storage in given or storage in alive:
                continue
            if isinstance(size, torch.SymInt) and not torch_api.has_hint(size):
                return None
            alive[storage] = torch_api.size_hint(size)
            held += alive[storage]
        peak = max(peak, held)
        for storage in ending.get(place, ()):
            held -= alive.pop(storage, 0)
            given.add(storage)  # it is not made again
    return peak


def made_by(node: torch.fx.Node) -> Iterator[tuple[Storage, int | torch.SymInt]]:
    """The storages of what a node gives, and their bytes."""
    for value in leaves(fake_value(node)) if node.op != "output" else ():
        if is_strided(value):
            (storage,) = tensor_storages(value)
            yield storage, value.untyped_storage().nbytes()


def is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
