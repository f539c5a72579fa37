"""Views of inputs that a graph writes, returned from it: they are taken of the inputs themselves, after the call.

AOTAutograd makes such a result again from the input it is a view of. Where the view has symbolic sizes it does not call
the view again, but goes by the strides and the offset of what the graph returned; and that was a view of new elements,
not of the input:

    x = wide[:, 1:]                      # begins at the second element of its storage
    x.add_(1)
    return x[n // 2:], x.sum()           # x.as_strided(..., n // 2 * width): begins one element too early

Where two inputs are views of one storage it goes by that storage, which is not what the view was called on.

So the graph returns the numbers that the views need, and the views are called on its inputs, as eager calls them:

    return x.sum(), n // 2               # and x[n // 2:] is put in front
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import Storage, called_name, fake_value, input_storages, mutates, storages_of

Function = Callable[..., Any]
NONE: frozenset[Storage] = frozenset()
# They change how a tensor looks, not its elements: a view of it from before is no view of what it is now.
RESHAPING = frozenset(
    {"resize_", "resize_as_", "set_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_"}
    | {"squeeze_", "unsqueeze_", "detach_", "requires_grad_"}
)
# A view has a gradient or none by the mode it is taken in.
MODES = frozenset({"_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"})


def view_written_inputs(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[[Function], Function] | None:
    """Take the results that view written inputs out of `gm`, in place, where AOTAutograd would not call the views.

    Returns what adds them to the results again, or None if there are none, which is nearly always so.
    """
    results: Any = gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        return None
    shared = shared_by_inputs(gm.graph)
    found = [result for result in results if isinstance(result, torch.fx.Node) and is_lost(result, shared)]
    if not found:
        return None
    written = written_inputs(gm.graph)
    found = [result for result in found if not written.isdisjoint(storages(result))]
    if not found or any(called_name(node) in RESHAPING for node in gm.graph.nodes):
        return None
    views = Views(gm.graph, example_inputs)
    taken = {result for result in found if itself(result).op != "placeholder" and views.lead_to(result)}
    return called_later(gm, taken) if taken else None


def storages(node: torch.fx.Node) -> frozenset[Storage]:
    """The storages of a value; values inside of a transform of functions (vmap) have none of their own."""
    try:
        return storages_of(node)
    except NotImplementedError:
        return NONE


def shared_by_inputs(graph: torch.fx.Graph) -> frozenset[Storage]:
    """The storages that several inputs are views of."""
    once: set[Storage] = set()
    several: set[Storage] = set()
    for node in graph.find_nodes(op="placeholder"):
        own = storages(node)
        several |= once & own
        once |= own
    return frozenset(several)


def is_lost(result: torch.fx.Node, shared: frozenset[Storage]) -> bool:
    """Whether AOTAutograd would not call the view again, or not of the input that it is a view of. A view of which all
    is known may be taken of one with symbolic sizes: x[:n // 2][0:1]."""
    own = storages(result)
    if not shared.isdisjoint(own):
        return True
    node = itself(result)
    while node.op != "placeholder" and not own.isdisjoint(storages(node)):
        if has_symbols(fake_value(node)) or any(not storages(operand) for operand in node.all_input_nodes):
            return True
        tensors = tensors_of(node)
        if not tensors:
            break
        node = tensors[0]
    return has_symbols(fake_value(node))


def has_symbols(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not all(type(each) is int for each in (*value.shape, *value.stride(), value.storage_offset()))


def written_inputs(graph: torch.fx.Graph) -> frozenset[Storage]:
    """The storages of inputs that something in a graph may write into."""
    writers = (node for node in graph.nodes if node.op.startswith("call_") and mutates(node))
    touched = NONE.union(*(storages(operand) for node in writers for operand in node.all_input_nodes))
    return input_storages(graph) & touched


def itself(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the tensor that a node's value is: y.add_(1) is y."""
    while node.op.startswith("call_") and mutates(node) and "out" not in node.kwargs:
        first = node.args[0] if node.args else None
        if not isinstance(first, torch.fx.Node) or storages(first) != storages(node):
            break
        node = first
    return node


def tensors_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [itself(operand) for operand in node.all_input_nodes if storages(operand)]


def is_plain(value: object) -> bool:
    """Whether an input is a tensor of no type of the user's own."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) or torch_api.is_fake(value)


class Views:
    """Which values of a graph are its inputs, or can be had from them by calls of views."""

    def __init__(self, graph: torch.fx.Graph, example_inputs: Sequence[Any]) -> None:
        inputs = zip(graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        self.known = {node: is_plain(value) for node, value in inputs}

    def lead_to(self, node: torch.fx.Node) -> bool:
        path, waiting = [], [itself(node)]
        while waiting:
            current = waiting.pop()
            if current not in self.known:
                path.append(current)
                waiting.extend(tensors_of(current))
        for current in reversed(path):
            self.known[current] = self.is_view(current)
        return self.known[itself(node)]

    def is_view(self, node: torch.fx.Node) -> bool:
        tensors = tensors_of(node)
        if node.op not in ("call_function", "call_method") or mutates(node) or not tensors:
            return False
        numbers = [operand for operand in node.all_input_nodes if not storages(operand)]
        return (
            storages(node) <= storages(tensors[0])
            and all(isinstance(fake_value(operand), (int, torch.SymInt)) for operand in numbers)
            and all(self.known.get(operand, False) for operand in tensors)
        )


def called_later(gm: torch.fx.GraphModule, taken: set[torch.fx.Node]) -> Callable[[Function], Function]:
    """Take results out of a graph; another graph calls the views, and puts all results where they were."""
    output = gm.graph.output_node()
    results: Any = output.args[0]
    path: set[torch.fx.Node] = set()
    waiting = [itself(result) for result in taken]
    while waiting:
        node = waiting.pop()
        if node not in path and node.op != "placeholder":
            path.add(node)
            waiting.extend(tensors_of(node))
    calls = [node for node in gm.graph.nodes if node in path or called_name(node) in MODES]
    inputs = gm.graph.find_nodes(op="placeholder")
    needed = dict.fromkeys(operand for node in calls for operand in node.all_input_nodes if not storages(operand))
    others = (each for each in results if isinstance(each, torch.fx.Node) and each not in taken)
    numbers = (node for node in needed if node.op != "placeholder")  # which may be results themselves
    kept = list(dict.fromkeys([*others, *numbers]))

    after = torch.fx.Graph()
    there = {node: after.placeholder(node.name) for node in inputs}
    there |= {node: after.placeholder(f"{node.name}_result") for node in kept}
    for node in calls:
        there[node] = after.node_copy(node, lambda operand: there[itself(operand)])
    after.output(torch.fx.node.map_arg(tuple(results), lambda node: there[itself(node) if node in taken else node]))
    whole = torch.fx.GraphModule(torch.nn.Module(), after).forward

    output.args = (tuple(kept),)
    for node in reversed(calls):
        if node in path and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()

    def with_views(function: Function) -> Function:
        def call(*args: Any) -> Any:
            return whole(*args, *function(*args))

        return call

    return with_views
