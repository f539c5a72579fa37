"""The order of a graph's nodes: made valid again after rewrites, and made local for memory's sake.

Both change the order alone, never a node.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator

import torch

from ferrite.graph.facts import schema_of
from ferrite.graph.regions import Regions, has_effect, is_random, is_wait, mutates

# Nodes with this key in their metadata run in the order of the numbers under it, whatever moves them.
PLACE = "place_in_order"


class GraphCycle(ValueError):
    """Nodes of a graph wait for each other, or for a node outside of it: no order is valid."""

    def __init__(self, message: str, nodes: list[torch.fx.Node]) -> None:
        super().__init__(message)
        self.nodes = nodes


def stable_topological_sort(graph: torch.fx.Graph) -> bool:
    """Order the nodes so that operands come before users; whether any moved.

    A node that came too early is put right after the last of its operands; all others keep their order, a valid order
    is kept as it is. Of the nodes that have a PLACE each waits for the one before it, as if that were an operand. A
    write is no operand of later reads: who sorts must not have moved reads across writes. Linear.
    """
    nodes = list(graph.nodes)
    order = _valid_order(nodes, _waits(nodes))
    if order == nodes:
        return False
    _apply(graph, order)
    return True


def _waits(nodes: list[torch.fx.Node]) -> Callable[[torch.fx.Node], list[torch.fx.Node]]:
    """What a node waits for: its operands, and of the nodes that have a place the one before it."""
    placed = sorted((node for node in nodes if PLACE in node.meta), key=lambda node: node.meta[PLACE])
    before = {node: first for first, node in itertools.pairwise(placed)}
    return lambda node: [*node.all_input_nodes, *([before[node]] if node in before else ())]


def _valid_order(
    nodes: list[torch.fx.Node], waits: Callable[[torch.fx.Node], list[torch.fx.Node]]
) -> list[torch.fx.Node]:
    missing: dict[torch.fx.Node, int] = {}
    waiting: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    order: list[torch.fx.Node] = []
    done: set[torch.fx.Node] = set()
    last = [node for node in nodes if node.op == "output"]  # what has no users may stand anywhere, but not behind it
    for start in nodes:
        if start.op == "output":
            continue
        absent = [operand for operand in dict.fromkeys(waits(start)) if operand not in done]
        if absent:
            missing[start] = len(absent)
            for operand in absent:
                waiting.setdefault(operand, []).append(start)
            continue
        ready = [start]
        while ready:
            node = ready.pop()
            order.append(node)
            done.add(node)
            woken = []
            for user in waiting.pop(node, ()):
                missing[user] -= 1
                if not missing[user]:
                    del missing[user]
                    woken.append(user)
            ready += reversed(woken)
    for output in last:
        if any(operand not in done for operand in output.all_input_nodes):
            missing[output] = 1
    if missing:
        raise _why_stuck(missing, set(nodes), done, waits)
    return order + last


def _why_stuck(
    missing: dict[torch.fx.Node, int],
    inside: set[torch.fx.Node],
    done: set[torch.fx.Node],
    waits: Callable[[torch.fx.Node], list[torch.fx.Node]],
) -> GraphCycle:
    path: dict[torch.fx.Node, None] = {}
    node = next(iter(missing))
    while node not in path:
        path[node] = None
        operand = next(each for each in waits(node) if each not in done)
        if operand not in inside:
            return GraphCycle(f"{node.name} uses {operand.name}, which is not in the graph", [node, operand])
        node = operand
    walked = list(path)
    cycle = walked[walked.index(node) :][::-1]
    names = " -> ".join(each.name for each in [*cycle, cycle[0]])
    return GraphCycle(f"no order is valid, these nodes wait for each other: {names}", cycle)


def _apply(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    first = next(iter(graph.nodes))
    if order[0] is not first:
        first.prepend(order[0])
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)


def users_in_order(graph: torch.fx.Graph) -> None:
    """Let every node list its users as they stand in the graph, and not as edits have come about.

    Who goes through users, as a partitioner does, then decides by the graph alone.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in places:
        if len(node.users) > 1:
            users = sorted(node.users, key=places.__getitem__)
            node.users.clear()
            node.users.update(dict.fromkeys(users))


def reorder_for_locality(graph: torch.fx.Graph) -> int:
    """Put producers right before their earliest user, where that is free; how many now stand elsewhere.

    Values then live shorter. From the last node to the first, each operand whose users have all been passed is moved
    before the node at hand, so that the last operand's chain is the nearest. Left alone: random draws, effects, what a
    wait waits for (a collective must start early, and in the same order in every process), anything across a write,
    and the writes into inputs at the graph's end with all that stands behind them. Meant for inference: in training
    graphs the partitioner has chosen the order. Linear.
    """
    regions = Regions(graph)
    before = {node: node.prev for node in graph.nodes}
    unpassed = {node: len(node.users) for node in graph.nodes}
    epilogue = next((node for node in graph.nodes if _writes_input(node)), None)
    moved: list[torch.fx.Node] = []
    for node in _backwards(graph):
        operands = node.all_input_nodes
        for operand in operands:
            unpassed[operand] -= 1
        if epilogue is None and not is_wait(node):
            for operand in operands:
                if not unpassed[operand] and regions.same_region(operand, node) and _movable(operand):
                    moved.append(operand)
                    if node.prev is not operand:
                        node.prepend(operand)
        if node is epilogue:
            epilogue = None
    return sum(before[node] is not node.prev for node in moved)


def _backwards(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The nodes from the last to the first, those moved before the current one included."""
    nodes = iter(graph.nodes)
    node = next(iter(reversed(graph.nodes)), None)
    end = next(nodes).prev if node is not None else None  # the list is a ring through a node of its own
    while node is not None and node is not end:
        yield node
        node = node.prev


def _movable(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call_") or node.target is operator.getitem:
        return False
    if is_wait(node):
        return True  # the later the wait, the more runs meanwhile
    return not (mutates(node) or is_random(node) or has_effect(node))


def _writes_input(node: torch.fx.Node) -> bool:
    schema = schema_of(node.target)
    if schema is None or schema.name != "aten::copy_" or not node.args:
        return False
    target = node.args[0]
    return isinstance(target, torch.fx.Node) and target.op == "placeholder"
