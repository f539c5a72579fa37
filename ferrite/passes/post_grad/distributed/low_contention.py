"""Large collectives that leave the processors of a GPU to what is computed meanwhile: copies between memories.

    all_gather_into_tensor(x, ranks, group)     =>     symm_mem._low_contention_all_gather(x, group)

They need memory that the ranks of a group share, which torch has on GPUs once `enable_symm_mem_for_group` was called;
elsewhere, as on CPUs, and where one rank of a group cannot open the memory of the others, collectives stay as they are,
with that for a reason. So do those on lists, and into memory that is there; and what torch's operators do not do as a
collective does it (`shared_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ferrite.errors import Refusal
from ferrite.graph import mode_of
from ferrite.passes.post_grad.distributed.agreement import all_share_memory, decide
from ferrite.passes.post_grad.distributed.exchanges import COPIES, MEMBERS, WHY, Exchange, copies_of
from ferrite.passes.post_grad.distributed.node_order import Layout
from ferrite.passes.post_grad.distributed.overlap import layout_of
from ferrite.passes.post_grad.distributed.settings import MB, LowContention, chosen
from ferrite.passes.post_grad.distributed.shared_memory import (
    is_product_in_shared_memory,
    refuse_memory,
    refuse_operator,
)
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
    products = [place for place, node in enumerate(layout.nodes) if is_product_in_shared_memory(node)]
    impossible = {
        number: refusal
        for number, exchange in enumerate(layout.exchanges)
        if (refusal := refuse_copies(exchange, spans[exchange.start], products, sharing)) is not None
    }
    for number, refusal in impossible.items():
        layout.exchanges[number].start.meta.setdefault(WHY, refusal.reason)

    def own_choice() -> list[int]:
        found = []
        for number, exchange in enumerate(layout.exchanges):
            if number in impossible:
                continue
            refusal = refuse(exchange, layout, settings, spans)
            if refusal is None:
                found.append(number)
            else:
                exchange.start.meta.setdefault(WHY, refusal.reason)
        return found

    # what is possible is among what ranks must have in common: nobody does what another has decided for another graph
    what = f"copies for {len(sharing)} of {len(groups)} groups, but {sorted(impossible)}"
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


def refuse_copies(
    exchange: Exchange, between: tuple[int, int], products: Sequence[int], sharing: Collection[str]
) -> Refusal | None:
    """Why a collective cannot be copies; None where it can. `between`: where it begins and is waited for. `products`:
    places of products in shared memory. `sharing`: groups whose ranks share memory."""
    start = exchange.start
    if start.target not in COPIES or start.kwargs:
        return Refusal("it is not one tensor of each rank, into memory of its own")
    operator = copies_of(start.target)
    if exchange.group not in sharing or operator is None:
        return Refusal("the ranks of its group share no memory")
    begin, end = between
    if any(begin < place < end for place in products):
        return Refusal("a product in the same shared memory is computed while it is on its way")
    return refuse_operator(exchange, operator) or refuse_memory(exchange)


def refuse(
    exchange: Exchange,
    layout: Layout,
    settings: LowContention,
    spans: Mapping[torch.fx.Node, tuple[int, int]],
) -> Refusal | None:
    """Why a collective is not to be copies; None where it is."""
    if min(exchange.given, exchange.result) < settings.min_mb * MB:
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
