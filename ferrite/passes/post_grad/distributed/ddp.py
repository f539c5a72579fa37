"""Gradients that DistributedDataParallel averages are averaged in buckets, as its own reducer does it.

    w = wait(all_reduce(div(g, ranks)))        f = wait(all_reduce(div(cat(flat g, flat h), ranks)))
    v = wait(all_reduce(div(h, ranks)))   =>   w, v = the parts of f, each in its shape

That is how its Python reducer (`torch._dynamo.config.optimize_ddp = "python_reducer"`) is captured, one collective for
each parameter. The first bucket is small, so that it is on its way soon; with `distributed="auto"` the cost model says
how large buckets are. Waits are put off to whoever reads the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.graph import fake_value, mode_of
from ferrite.machines import machine_of
from ferrite.passes.post_grad.distributed.agreement import decide
from ferrite.passes.post_grad.distributed.bucketing import best_buckets, filled, merged_job, waits_in
from ferrite.passes.post_grad.distributed.exchanges import ALL_REDUCE, MEMBERS, Exchange
from ferrite.passes.post_grad.distributed.node_order import Layout, rewrite_order
from ferrite.passes.post_grad.distributed.overlap import layout_of
from ferrite.passes.post_grad.distributed.packing import Merge, operand_of, refusal_to_merge
from ferrite.passes.post_grad.distributed.settings import MB, DdpFuse, chosen, is_auto
from ferrite.pipeline import PassContext, graph_pass

aten = torch.ops.aten
FIRST_MB = 1.0
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)


@graph_pass(stage="post_grad", with_collectives=True)
def fuse_ddp_communication(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Averages of gradients over all ranks are made in buckets, and waited for late."""
    settings = chosen(context.options, "ddp_fuse", DdpFuse)
    layout = None if settings is None else layout_of(gm.graph, context.options)
    if settings is None or layout is None or layout.has_streams:
        return 0
    runs: dict[tuple[Any, ...], list[Exchange]] = {}
    for exchange in layout.exchanges:
        if is_average(exchange):
            divided = operand_of(exchange)
            divisor = divided.args[1]
            runs.setdefault((*exchange.key, exchange.dtypes, divisor), []).append(exchange)
    for run in runs.values():
        run.sort(key=lambda each: layout.job(each).available)
    numbers = {exchange: number for number, exchange in enumerate(layout.exchanges)}

    def own_buckets() -> list[list[int]]:
        if runs and is_auto(context.options):
            found = best_buckets(layout, list(runs.values()), machine_of(layout.exchanges[0].device))
        else:
            caps = FIRST_MB, settings.bucket_mb
            found = [
                each for run in runs.values() for each in filled(run, layout, lambda number: MB * caps[number > 0])
            ]
        return [[numbers[exchange] for exchange in members] for members in found]

    decided = decide(gm, "average", context.options, layout.exchanges, layout.freedom(), own_buckets)
    return fused(layout, [[layout.exchanges[each] for each in members] for members in decided], settings, context)


def is_average(exchange: Exchange) -> bool:
    """Whether it is the sum of what was divided, and goes out of the graph, or into a gradient."""
    start = exchange.start
    divided = operand_of(exchange) if start.target is ALL_REDUCE else None
    if not isinstance(divided, torch.fx.Node) or divided.target not in DIVISIONS or divided.kwargs:
        return False
    if refusal_to_merge(exchange, "traced") is not None or exchange.reduce_op != "sum":
        return False
    gradient: Any = divided.args[0]
    if fake_value(divided).dtype != fake_value(gradient).dtype:
        return False
    (wait,) = exchange.waits
    user = next(iter(wait.users), None)
    is_number = isinstance(divided.args[1], (int, float))
    return is_number and len(wait.users) == 1 and user is not None and (user.op == "output" or is_copy(user))


def is_copy(node: torch.fx.Node) -> bool:
    return node.target in (aten.copy_.default, aten.copy.default)


def fused(layout: Layout, buckets: Sequence[Sequence[Exchange]], settings: DdpFuse, context: PassContext) -> int:
    mode, places, wanted, gone = mode_of(layout.graph), dict(layout.place), [], 0
    for members in buckets:
        if not context.fuel.left:
            break
        context.fuel.spend()
        job = merged_job(members, layout)
        last = max((each.start for each in members), key=layout.place.__getitem__)
        style = "coalesced" if settings.style == "coalesced" else "traced"
        divided = [operand_of(each) for each in members]
        merge = Average(members, style, layout.graph, mode, last) if style == "traced" else None
        made = (merge or Merge(members, style, layout.graph, mode, last)).write()
        places |= dict.fromkeys(made, layout.place[last])
        start = next(node for node in made if MEMBERS in node.meta)
        wanted.append((job.available, start))
        if not settings.delay_waits:
            wanted += [(job.available, each) for each in made if each.args and each.args[0] is start]
        else:
            wanted += waits_in(made, job, context)
        for node in divided:
            if isinstance(node, torch.fx.Node) and not node.users:
                layout.graph.erase_node(node)
        gone += len(members) - 1
    if gone:
        in_buckets = {exchange for members in buckets for exchange in members}
        rewrite_order(layout.graph, places, [*wanted, *layout.kept(in_buckets)])
    return gone


class Average(Merge):
    """Divided once they are packed: one call instead of one for each."""

    def __init__(self, members: Sequence[Exchange], *more: Any) -> None:
        super().__init__(members, *more)
        self.divided = [operand_of(each) for each in self.members]
        self.operands = [each.args[0] for each in self.divided]

    def exchanged(self, packed: torch.fx.Node) -> torch.fx.Node:
        first = self.divided[0]
        return super().exchanged(self.writer.call(first.target, packed, first.args[1]))
