"""When a pending value goes to memory though nothing forces it.

A value with one reader is computed inside that reader. With more, it is computed again in each while that is cheaper
than a round trip through memory: few operators, none expensive, few loads. A chain with many loads or very many
operators goes to memory even with one reader, so that what is copied into users stays small. So does what is computed
from several tensors as large as it and then added up by index: they can go before there is a target, which may be the
largest of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ferrite.capture import torch_operators
from ferrite.ir.expr import Cast, Expr, Load, Masked, Op
from ferrite.ir.index import Axis, Index
from ferrite.ir.questions import nodes_of
from ferrite.ir.scalar import OPERATORS
from ferrite.lower.value import Box

RECOMPUTE_COST = 12  # additions that cost about as much as writing and reading an element
RECOMPUTE_LOADS = 2
MOST_LOADS = 16
MOST_OPERATORS = 100


def uses_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """How often each node's elements are asked for; a view passes on how often its own are."""
    uses: dict[torch.fx.Node, int] = defaultdict(int)
    for node in reversed(graph.nodes):
        count = uses[node] if is_view(node) else 1
        for operand in node.all_input_nodes:
            uses[operand] += max(count, 1)
    return uses


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
    work = [item for item in nodes if isinstance(item, Op | Cast | Masked)]
    if loads > MOST_LOADS or len(work) > MOST_OPERATORS:
        return True
    if uses <= 1:
        return False
    cost = sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in work)
    return cost > RECOMPUTE_COST or loads > RECOMPUTE_LOADS
