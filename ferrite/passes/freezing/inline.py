"""Parameters become constants of the graph: inputs that are state of a module are read from the graph's own module.

What the graph writes stays an input, and so does what an output shares memory with: a caller may write into that. The
constant is the parameter's own memory, not a copy of it.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ferrite.capture import CapturedGraph, Parameter, on_real_tensors
from ferrite.graph import attribute_of, fake_value, innermost_first, storage_bytes, storages_of
from ferrite.pipeline import PassRecord
from ferrite.rewrite import VisibleMemory, difference


@dataclass(frozen=True)
class Inlined:
    """A graph over the inputs that stayed: their old positions, and the parameters at the others."""

    graph: CapturedGraph
    kept: tuple[int, ...]
    frozen: Mapping[int, Parameter]


def inline_parameters(graph: CapturedGraph) -> Inlined:
    """A copy of the graph that reads its parameters by itself; the graph given stays as it is."""
    gm = copied(graph.gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    visible = VisibleMemory(gm.graph)
    frozen = {
        position: parameter
        for position, parameter in graph.parameters.items()
        if can_be_constant(placeholders[position], parameter, visible)
    }
    names = (f"_frozen_{number}" for number in itertools.count())
    names = (name for name in names if not hasattr(gm, name))
    last = placeholders[-1] if placeholders else None
    for position, parameter in frozen.items():
        name, old = next(names), placeholders[position]
        with on_real_tensors():
            gm.register_buffer(name, parameter.tensor.detach(), persistent=False)
        assert last is not None
        with gm.graph.inserting_after(last):
            constant = gm.graph.get_attr(name)
        constant.meta.update({key: value for key, value in old.meta.items() if key != "desc"})
        old.replace_all_uses_with(constant)
    for position in frozen:
        gm.graph.erase_node(placeholders[position])
    gm.recompile()
    kept = tuple(position for position in range(len(placeholders)) if position not in frozen)
    static, donated = renumbered(graph.static_inputs, kept), renumbered(graph.donated_inputs, kept)
    return Inlined(replace(graph, gm=gm, parameters={}, static_inputs=static, donated_inputs=donated), kept, frozen)


def inlined_with_record(graph: CapturedGraph) -> tuple[Inlined, PassRecord]:
    """The same, with what became constant, as a pass of the stage."""
    start = time.perf_counter()
    inlined = inline_parameters(graph)
    seconds = time.perf_counter() - start
    before, after = len(graph.gm.graph.nodes), len(inlined.graph.gm.graph.nodes)
    placeholders = graph.gm.graph.find_nodes(op="placeholder")
    size = sum(int(storage_bytes(fake_value(placeholders[position]))) for position in inlined.frozen)
    name, count = "inline_parameters", len(inlined.frozen)
    facts = {"parameters": count, "bytes": size}
    return inlined, PassRecord(name, seconds, {name: count}, before, after, facts=facts)


def can_be_constant(node: torch.fx.Node, parameter: Parameter, visible: VisibleMemory) -> bool:
    value, places = fake_value(node), storages_of(node)
    if not isinstance(value, torch.Tensor) or difference(value, parameter.tensor) is not None:
        return False
    shared_with_output = any(place in visible.readers for place in places)
    return not shared_with_output and visible.written.isdisjoint(places)


def renumbered(positions: frozenset[int], kept: tuple[int, ...]) -> frozenset[int]:
    """The new positions of those inputs that stayed."""
    return frozenset(new for new, old in enumerate(kept) if old in positions)


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module with its graph and all graphs nested in it; the tensors that they read stay the same ones."""
    reads = (attribute_of(node) for each in innermost_first(gm) for node in each.graph.find_nodes(op="get_attr"))
    tensors = [tensor for tensor in reads if isinstance(tensor, torch.Tensor)]
    tensors += [*gm.parameters(), *gm.buffers()]
    return copy.deepcopy(gm, {id(tensor): tensor for tensor in tensors})
