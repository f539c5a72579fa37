"""Random numbers are drawn in the order of the program, whatever users' hooks and later passes do to the graph.

    a = rand(2)                         b = rand(2)                      a = rand(2)
    b = rand(2)      a hook swaps       a = rand(2)      here            b = rand(2)
    c = a - b            =>             c = a - b         =>             c = a - b

The calls share a generator, so that each depends on all before it, and no argument says so. Their order is noted when
the stage begins. `chain_random_ops` gives each call a place behind the one before it; from then on every sort of the
graph treats that as an operand (see `ferrite.graph.order`). The order of a graph's nodes is the order in which they
run, so that this costs nothing per call.
"""

from __future__ import annotations

import torch

from ferrite.graph import PLACE, Regions, is_random, stable_topological_sort
from ferrite.pipeline import PassContext, graph_pass

# Under this key a node keeps its number among the random calls of the graph that the stage was given.
DRAWN = "drawn_in_program"


@graph_pass(stage="post_grad")
def note_random_order(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The order in which the program draws random numbers is noted, for `chain_random_ops`."""
    if context.options.eager_random_order:
        for number, node in enumerate(random_calls(gm.graph)):
            node.meta[DRAWN] = number
            context.facts["random calls"] += 1
    return 0


@graph_pass(stage="post_grad", after="note_random_order")
def chain_random_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Random numbers are drawn in the order of the program: calls that were moved go back, and none moves later."""
    found = random_calls(gm.graph)
    if not context.options.eager_random_order or len(found) < 2:
        return 0
    wanted = in_program_order(found)
    for place, node in enumerate(wanted):
        node.meta[PLACE] = place
    regions = Regions(gm.graph)
    if not stable_topological_sort(gm.graph):
        return 0
    refuse_moves_across_writes(gm.graph, regions)
    return sum(before is not after for before, after in zip(found, wanted, strict=True)) or 1


def random_calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if is_random(node)]


def in_program_order(found: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The calls as the program has them; one that a hook added keeps its place among the others."""
    known = iter(sorted((node for node in found if DRAWN in node.meta), key=lambda node: node.meta[DRAWN]))
    return [next(known) if DRAWN in node.meta else node for node in found]


def refuse_moves_across_writes(graph: torch.fx.Graph, before: Regions) -> None:
    after = Regions(graph)
    for node in graph.nodes:
        if before.of(node) != after.of(node):
            raise ValueError(f"drawing in the order of the program would move {node.name} across a write")
