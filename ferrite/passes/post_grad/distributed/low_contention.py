"""Large collectives that leave the processors of a GPU to what is computed meanwhile: copies between memories.

    all_gather_into_tensor(x, ranks, group)     =>     symm_mem._low_contention_all_gather(x, group)

They need memory that the ranks of a group share, which torch has on GPUs once `enable_symm_mem_for_group` was called;
elsewhere, as on CPUs, collectives stay as they are, with that for a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ferrite.capture import torch_runtime
from ferrite.errors import Refusal
from ferrite.graph import mode_of
from ferrite.passes.post_grad.distributed.exchanges import COPIES, MEMBERS, WHY, Exchange, copies_of
from ferrite.passes.post_grad.distributed.node_order import Layout
from ferrite.passes.post_grad.distributed.overlap import layout_of
from ferrite.passes.post_grad.distributed.settings import LowContention, chosen
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer, inherit

MB = 1e6


@graph_pass(stage="post_grad", with_collectives=True)
def low_contention_collectives(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Large collectives beside computation are copies between memories that ranks share."""
    settings = chosen(context.options, "low_contention", LowContention)
    layout = None if settings is None else layout_of(gm.graph, context.options)
    if settings is None or layout is None:
        return 0
    writer, count = Writer(gm.graph, mode_of(gm.graph)), 0
    spans = {each.start: span(each, layout) for each in layout.exchanges}
    for exchange in layout.exchanges:
        if exchange.start.target not in COPIES or not context.fuel.left:
            continue
        refusal = refuse(exchange, layout, settings, spans)
        if refusal is not None:
            exchange.start.meta.setdefault(WHY, refusal.reason)
            continue
        context.fuel.spend()
        replace(gm.graph, exchange, writer)
        count += 1
    return count


def span(exchange: Exchange, layout: Layout) -> tuple[int, int]:
    return layout.place[exchange.start], min(layout.place[wait] for wait in exchange.waits)


def refuse(
    exchange: Exchange, layout: Layout, settings: LowContention, spans: Mapping[torch.fx.Node, tuple[int, int]]
) -> Refusal | None:
    """Why a collective stays as it is; None where it is to be copies."""
    if not torch_runtime.has_symmetric_memory(exchange.group) or copies_of(exchange.start.target) is None:
        return Refusal("the ranks of its group share no memory")
    if exchange.start.kwargs or min(exchange.given, exchange.result) < settings.min_mb * MB:
        return Refusal("a rank has less of it than min_mb says")
    if settings.ignore_overlap:
        return None
    start, wait = spans[exchange.start]
    if layout.work[wait] == layout.work[start]:
        return Refusal("no product is computed while it is on its way")
    others = (each for each in layout.exchanges if each.group != exchange.group)
    if any(start < end and begin < wait for begin, end in (spans[each.start] for each in others)):
        return Refusal("one of another group is on its way at the same time")
    return None


def replace(graph: torch.fx.Graph, exchange: Exchange, writer: Writer) -> None:
    start = exchange.start
    operands = (start.args[0], exchange.reduce_op) if exchange.kind == "reduce_scatter" else (start.args[0],)
    with graph.inserting_before(start):
        made = writer.call(copies_of(start.target), *operands, exchange.group)
    inherit(made, start)
    made.meta |= {key: start.meta[key] for key in (MEMBERS, WHY) if key in start.meta}
    start.replace_all_uses_with(made)
    graph.erase_node(start)
