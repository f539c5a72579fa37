"""Large collectives that leave the processors of a GPU to what is computed meanwhile: copies between memories.

    all_gather_into_tensor(x, ranks, group)     =>     symm_mem._low_contention_all_gather(x, group)

They need memory that the ranks of a group share, which torch has on GPUs once `enable_symm_mem_for_group` was called;
elsewhere, as on CPUs, and where one rank of a group cannot open the memory of the others, collectives stay as they are,
with that for a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ferrite.errors import Refusal
from ferrite.graph import mode_of
from ferrite.passes.post_grad.distributed.agreement import all_share_memory, decide
from ferrite.passes.post_grad.distributed.exchanges import COPIES, MEMBERS, WHY, Exchange, copies_of
from ferrite.passes.post_grad.distributed.node_order import Layout
from ferrite.passes.post_grad.distributed.overlap import layout_of
from ferrite.passes.post_grad.distributed.settings import MB, LowContention, chosen
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer, inherit


@graph_pass(stage="post_grad", with_collectives=True)
def low_contention_collectives(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Large collectives beside computation are copies between memories that ranks share."""
    settings = chosen(context.options, "low_contention", LowContention)
    layout = None if settings is None else layout_of(gm.graph, context.options)
    if settings is None or layout is None:
        return 0
    groups = dict.fromkeys(each.group for each in layout.exchanges if each.start.target in COPIES)
    sharing = {group for group in groups if all_share_memory(group)}
    spans = {each.start: span(each, layout) for each in layout.exchanges}

    def own_choice() -> list[int]:
        found = []
        for number, exchange in enumerate(layout.exchanges):
            if exchange.start.target in COPIES:
                refusal = refuse(exchange, layout, settings, spans, sharing)
                if refusal is None:
                    found.append(number)
                else:
                    exchange.start.meta.setdefault(WHY, refusal.reason)
        return found

    what = f"copies for {len(sharing)} of {len(groups)} groups"
    decided = decide(gm, what, context.options, layout.exchanges, layout.freedom(), own_choice)
    writer, count = Writer(gm.graph, mode_of(gm.graph)), 0
    for number in decided:
        if not context.fuel.left:
            break
        context.fuel.spend()
        replace(gm.graph, layout.exchanges[number], writer)
        count += 1
    return count


def span(exchange: Exchange, layout: Layout) -> tuple[int, int]:
    return layout.place[exchange.start], min(layout.place[wait] for wait in exchange.waits)


def refuse(
    exchange: Exchange,
    layout: Layout,
    settings: LowContention,
    spans: Mapping[torch.fx.Node, tuple[int, int]],
    sharing: Collection[str],
) -> Refusal | None:
    """Why a collective stays as it is; None where it is to be copies. `sharing`: groups whose ranks share memory."""
    if exchange.group not in sharing or copies_of(exchange.start.target) is None:
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
