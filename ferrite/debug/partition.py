"""What the partitioner chose: which values the forward graph keeps for the backward graph, and which that computes
again."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.debug.graph_record import target_text
from ferrite.debug.record import SavedForBackward, SavedValue
from ferrite.graph import Storage, describe_value, fake_value, input_storages, model_line, storage_bytes, storages_of


def partition_record(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> SavedForBackward:
    """Both graphs are cut from one and keep the names of its nodes: a call that is in both is computed twice."""
    output = forward.graph.output_node()
    results: Any = output.args[0]
    saved = [
        result
        for position, result in enumerate(results)
        if torch_api.is_saved_for_backward(output, position) and isinstance(result, torch.fx.Node)
    ]
    seen: set[Storage] = set()
    given = input_storages(forward.graph)
    made = []
    for node in (node for node in saved if node.op != "placeholder" and given.isdisjoint(storages_of(node))):
        made.append(value_of(node, counted=not seen.isdisjoint(storages_of(node))))
        seen |= storages_of(node)
    calls = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    twice = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in calls]
    again = [value_of(node) for node in twice if has_own_memory(node)]
    return SavedForBackward(kept=tuple(made), recomputed=tuple(again), inputs=len(saved) - len(made))


def value_of(node: torch.fx.Node, *, counted: bool = False) -> SavedValue:
    """`counted`: its memory was counted with another value."""
    value = fake_value(node)
    size = 0 if counted else torch_api.size_hint(storage_bytes(value))
    return SavedValue(target_text(node.target), describe_value(value), size, model_line(node))


def has_own_memory(node: torch.fx.Node) -> bool:
    """Views and sizes cost nothing to have again."""
    places = storages_of(node)
    return bool(places) and all(places.isdisjoint(storages_of(operand)) for operand in node.all_input_nodes)
