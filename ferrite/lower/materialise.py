"""When a pending value goes to memory though nothing forces it.

A value with one reader is computed inside that reader. With more, it is computed again in each while that is cheaper
than a round trip through memory: few operators, none expensive, few loads. A chain with many loads or very many
operators goes to memory even with one reader, so that what is copied into users stays small. So does what is computed
from several tensors as large as it and then added up by index: they can go before there is a target, which may be the
largest of all. And so does what is the last to read several such tensors made since the last call, when the next call
comes: it is in one kernel with them, which then need no memory, instead of keeping them until its reader.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from ferrite.capture import torch_operators
from ferrite.ir import OPERATORS, Axis, Cast, Expr, Index, Load, Masked, Op, Random, nodes_of
from ferrite.lower.value import Box
from ferrite.machines import machine_of

RANDOM_ADDITIONS = 40  # what a number costs: ten rounds of products, shared by four neighbours
MAX_LOADS = 16  # of one expression: limits on the time to compile what is copied into its users
MAX_OPERATORS = 100


def uses_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """How often each node's elements are asked for; a view passes on how often its own are."""
    uses: dict[torch.fx.Node, int] = defaultdict(int)
    for node in reversed(graph.nodes):
        count = uses[node] if is_view(node) else 1
        for operand in node.all_input_nodes:
            uses[operand] += max(count, 1)
    return uses


def returned_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What a graph returns, and what it returns views of."""
    found = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in found and is_view(node):
            found.update(node.all_input_nodes)
    return found


class SinceCall:
    """What was made since the last call: in memory, and pending."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.last = last_uses(graph)
        self.made: dict[str, tuple[int, Sequence[Index]]] = {}  # a buffer's last direct reader, and its sizes
        self.pending: list[tuple[int, Box]] = []  # with their last direct readers, too

    def settled(self, node: torch.fx.Node, box: Box) -> None:
        if box.expr is not None:
            self.pending.append((self.last[node], box))
        elif box.buffer is not None:
            self.made[box.buffer] = self.last[node], box.sizes

    def to_memory(self, position: int) -> list[Box]:
        """Pending boxes that should go to memory before a call at this place of the graph; a new stretch begins."""
        boxes = [box for last, box in self.pending if last > position and box.expr is not None]
        readers = Counter(name for box in boxes if box.expr is not None for name in box.expr.loads)
        found = [box for box in boxes if self.frees_more(box, readers, position)]
        self.made, self.pending = {}, []
        return found

    def frees_more(self, box: Box, readers: Counter[str], position: int) -> bool:
        """Whether at least two tensors of its sizes are read by it alone from here on."""
        assert box.expr is not None
        alone = [self.made[name] for name in box.expr.loads if name in self.made and readers[name] == 1]
        return sum(last < position and sizes == box.sizes for last, sizes in alone) >= 2


def last_uses(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The place in the graph of the last node that asks for each node's elements, through views too."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    last: dict[torch.fx.Node, int] = defaultdict(int)
    for node in reversed(graph.nodes):
        own = max(places[node], last[node]) if is_view(node) else places[node]
        for operand in node.all_input_nodes:
            last[operand] = max(last[operand], own)
    return last


def from_several(source: Expr, axes: Sequence[Index]) -> bool:
    """Whether an expression reads another element of more than one buffer at every point of some axes."""
    real = {item for item in axes if isinstance(item, Axis)}
    found = {item.buffer for item in nodes_of(source) if isinstance(item, Load) and real <= item.atoms}
    return len(found) > 1


def is_view(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and any(torch_operators.shared_arguments(node.target))


def worth_keeping(box: Box, uses: int) -> bool:
    """Whether a pending box should go to memory now."""
    assert box.expr is not None
    if not box.expr.loads:
        return False
    nodes = nodes_of(box.expr)
    loads = sum(isinstance(item, Load) for item in nodes)
    work = [item for item in nodes if isinstance(item, Op | Cast | Masked | Random)]
    if loads > MAX_LOADS or len(work) > MAX_OPERATORS:
        return True
    if uses <= 1:
        return False
    cost = sum(cost_of(item) for item in work)
    machine = machine_of(box.device)
    return cost > machine.max_recomputed_additions or loads > machine.max_recomputed_loads


def cost_of(item: Expr) -> int:
    """In additions."""
    if isinstance(item, Random):
        return RANDOM_ADDITIONS
    return OPERATORS[item.name].cost if isinstance(item, Op) else 1
