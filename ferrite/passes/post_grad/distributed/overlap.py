"""Collectives begin early and are waited for late, so that what is computed hides them.

    a = all_gather(p); a = wait(a)            a = all_gather(p); b = all_gather(q)
    y = mm(x, a)                       =>     a = wait(a); y = mm(x, a)
    b = all_gather(q); b = wait(b)            b = wait(b); z = mm(y, b)
    z = mm(y, b)

What gives more than it takes, as an all-gather of parameters, begins as late as it is still hidden, since its result
takes memory from then on; the others begin as soon as they can. `ferrite.passes.post_grad.distributed.timeline` has
the arithmetic. Nothing but the order of the graph changes, and every rank changes it in the same way.
"""

from __future__ import annotations

import torch

from ferrite.machines import AnyMachine, Network, machine_of
from ferrite.options import Options
from ferrite.passes.post_grad.distributed.agreement import decide
from ferrite.passes.post_grad.distributed.exchanges import WHY, exchanges_in
from ferrite.passes.post_grad.distributed.node_order import Layout, rewrite_order
from ferrite.passes.post_grad.distributed.settings import MB, Overlap, chosen, is_auto, network_for
from ferrite.passes.post_grad.distributed.timeline import UNLIMITED, Limits, Placement, forecast
from ferrite.pipeline import PassContext, graph_pass

MIN_GAIN = 1e-6  # seconds by which a graph should be done earlier, for the order to change where nobody asked for it


@graph_pass(stage="post_grad", with_collectives=True)
def overlap_scheduling(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Collectives begin early and are waited for late, so that what is computed meanwhile hides them."""
    settings = chosen(context.options, "overlap", Overlap)
    if settings is None:
        return 0
    layout = layout_of(gm.graph, context.options, settings.compute)
    return 0 if layout is None else scheduled(gm, layout, settings, context.options)


def layout_of(
    graph: torch.fx.Graph,
    options: Options,
    compute: float = 1.0,
    network: Network | None = None,
    machine: AnyMachine | None = None,
    in_place: bool = False,
) -> Layout | None:
    """The graph as a timeline has it, on the machine and the network that its collectives are on."""
    first = next(iter(exchanges_in(graph)), None)
    if first is None:
        return None
    network = network or network_for(options, first.device)
    return Layout(graph, network, machine or machine_of(first.device), compute, in_place)


def scheduled(gm: torch.fx.GraphModule, layout: Layout, settings: Overlap, options: Options) -> int:
    """Write the better order down; how many nodes stand elsewhere then."""
    if not layout.exchanges or layout.has_streams:
        return 0
    jobs = [layout.job(exchange) for exchange in layout.exchanges]
    placement = Placement(jobs, layout.clock, limits_for(layout, settings))
    placed = placement.placed()
    for number, exchange in enumerate(layout.exchanges):
        if number in placement.why:
            exchange.start.meta[WHY] = placement.why[number]

    def own_order() -> list[int]:
        """In which they begin: at one place, the first needed is the first. None of them where nothing is gained."""
        before, after = forecast(jobs, layout.clock), forecast(placed, layout.clock)
        if is_auto(options) and after.total > before.total - MIN_GAIN:
            return []
        return sorted(range(len(placed)), key=lambda each: (placed[each].start, placed[each].needed, each))

    order = decide(gm, "order", options, layout.exchanges, layout.freedom(), own_order)
    if not order:
        return 0
    starts = [layout.exchanges[number].start for number in order]
    wanted = [(placed[number].start, 1, layout.exchanges[number].start) for number in order]
    for job, exchange in zip(placed, layout.exchanges, strict=True):
        wanted += [(job.wait, 0, wait) for wait in exchange.waits]
    wanted.sort(key=lambda each: each[:2])  # what ends at a place is over before the next begins there
    return rewrite_order(layout.graph, layout.place, [(each[0], each[2]) for each in wanted], starts)


def limits_for(layout: Layout, settings: Overlap) -> Limits:
    held = layout.held()
    peak = max(held, default=0.0)
    more = max(settings.memory_mb * MB, settings.memory_percent / 100 * peak)
    return Limits(
        held,
        peak + more if settings.limits_memory else UNLIMITED,
        settings.in_flight_mb * MB,
        settings.prefetch,
        layout.work,
        settings.slack,
    )
