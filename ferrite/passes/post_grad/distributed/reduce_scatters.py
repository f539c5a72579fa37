"""Sums of reduce-scatters become reduce-scatters of sums: one collective instead of two.

    add(wait(reduce_scatter(a)), wait(reduce_scatter(b)))     =>     wait(reduce_scatter(add(a, b)))

As where a parameter is used twice. What is added first is rounded once more on the way in 16 bits, so that there it is
done only if asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.graph import HALVES, Regions, argument, fake_value, mode_of, same_sizes
from ferrite.options import NoSettings
from ferrite.passes.post_grad.distributed.exchanges import REDUCE_SCATTER, WAIT
from ferrite.passes.post_grad.distributed.settings import chosen, is_auto
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer, inherit

aten = torch.ops.aten
LINEAR = ("sum", "avg")


@graph_pass(stage="post_grad", with_collectives=True)
def dedup_reduce_scatter(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Sums of reduce-scatters become one reduce-scatter of the sum."""
    options = context.options
    if chosen(options, "dedup_reduce_scatter", NoSettings) is None or options.numerics == "strict":
        return 0
    mode, regions, count = mode_of(gm.graph), Regions(gm.graph), 0
    for node in list(gm.graph.nodes):  # a sum of sums is reached after its terms
        starts = terms(node)
        if starts is None or not context.fuel.left or (is_auto(options) and fake_value(node).dtype in HALVES):
            continue
        if not regions.all_in_one((*starts, node)):  # what they send may have been written meanwhile
            continue
        context.fuel.spend()
        regions.adopt(merge(gm.graph, node, starts, mode), node)
        count += 1
    return count


def terms(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The two reduce-scatters that a node adds; None where it does anything else."""
    if node.target is not aten.add.Tensor or argument(node, "alpha") != 1 or len(node.args) < 2:
        return None
    found = [scattered(operand) for operand in node.args[:2]]
    if found[0] is None or found[1] is None or found[0] is found[1]:
        return None
    first, second = found[0], found[1]
    values = value_of(first.args[0]), value_of(second.args[0])
    alike = first.args[1:] == second.args[1:] and not first.kwargs and not second.kwargs
    if not alike or first.args[1] not in LINEAR or values[0].dtype != values[1].dtype:
        return None
    return (first, second) if same_sizes(values[0].shape, values[1].shape) else None


def value_of(operand: Any) -> Any:
    return fake_value(operand)


def scattered(wait: Any) -> torch.fx.Node | None:
    """The reduce-scatter that is waited for, if it is read nowhere else."""
    if not isinstance(wait, torch.fx.Node) or wait.target is not WAIT or len(wait.users) != 1:
        return None
    start = wait.args[0]
    is_one = isinstance(start, torch.fx.Node) and start.target is REDUCE_SCATTER and len(start.users) == 1
    return start if is_one else None  # type: ignore[return-value]


def merge(
    graph: torch.fx.Graph, total: torch.fx.Node, starts: tuple[torch.fx.Node, torch.fx.Node], mode: Any
) -> torch.fx.Node:
    """The one that is there instead."""
    first, second = starts
    writer = Writer(graph, mode)
    with graph.inserting_before(total):
        added = writer.call(aten.add.Tensor, first.args[0], second.args[0])
        start = writer.call(REDUCE_SCATTER, added, *first.args[1:])
        wait = writer.call(WAIT, start)
    for node in (added, start, wait):
        inherit(node, total)
    waits: list[Any] = list(total.args[:2])
    total.replace_all_uses_with(wait)
    for gone in (total, *waits, first, second):
        graph.erase_node(gone)
    return start
