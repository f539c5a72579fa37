"""Collectives of one kind and group become one, so that fewer latencies are paid.

Members of a bucket are merged where the last of them can begin before the first is needed: then there is an order in
which all of them begin at one place and are waited for at another, and no cycle can come of it. Collectives that are
given a result of another are thus in a later bucket. How large buckets are is said by the settings; or, with
`distributed="auto"`, the cost model compares some sizes with each other, equal ones and growing ones, and with no
buckets at all, by when the graph would be done; those for which it would hold more memory than `overlap_scheduling` may
take are left out. All of it is decided by what every rank knows, sizes that are not known by those that were seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ferrite.errors import Refusal
from ferrite.graph import mode_of
from ferrite.machines import AnyMachine, machine_of
from ferrite.passes.post_grad.distributed.agreement import decide
from ferrite.passes.post_grad.distributed.exchanges import MEMBERS, WAIT, WHY, Exchange
from ferrite.passes.post_grad.distributed.node_order import Layout, rewrite_order
from ferrite.passes.post_grad.distributed.overlap import MIN_GAIN, layout_of, limits_for
from ferrite.passes.post_grad.distributed.packing import Merge, refusal_to_merge
from ferrite.passes.post_grad.distributed.settings import MB, Buckets, Overlap, chosen, is_auto
from ferrite.passes.post_grad.distributed.timeline import Job, Limits, Placement, forecast
from ferrite.pipeline import PassContext, graph_pass

Cap = Callable[[int], float]  # bytes of the bucket with a number
# What auto tries: parts of all bytes of a kind, at most so many megabytes; and buckets that grow from one part to
# another.
PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
GROWING = tuple(itertools.product((8, 16, 32, 128), (1, 2, 4)))
MAX_AUTO_MB = 500


@graph_pass(stage="post_grad", with_collectives=True)
def bucket_reduce_scatter(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Reduce-scatters of one group and type become one."""
    return bucket(gm, context, "reduce_scatter", chosen(context.options, "bucket_rs", Buckets))


@graph_pass(stage="post_grad", with_collectives=True)
def bucket_all_reduce(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """All-reduces of one group and type become one."""
    return bucket(gm, context, "all_reduce", chosen(context.options, "bucket_ar", Buckets))


@graph_pass(stage="post_grad", with_collectives=True)
def bucket_all_gather(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """All-gathers of one group become one."""
    return bucket(gm, context, "all_gather", chosen(context.options, "bucket_ag", Buckets))


def bucket(gm: torch.fx.GraphModule, context: PassContext, kind: str, settings: Buckets | None) -> int:
    """Merge the collectives of one kind; how many are no more."""
    layout = None if settings is None else layout_of(gm.graph, context.options)
    if settings is None or layout is None or layout.has_streams:
        return 0
    numbers = {exchange: number for number, exchange in enumerate(layout.exchanges)}

    def own_buckets() -> list[list[int]]:
        runs = runs_of(layout, kind, settings)
        if not runs:
            found = []
        elif is_auto(context.options):
            found = best_buckets(layout, runs, machine_of(layout.exchanges[0].device))
        else:
            found = [each for run in runs for each in filled(run, layout, cap_of(settings))]
        return [[numbers[exchange] for exchange in members] for members in found]

    decided = decide(gm, f"bucket {kind}", context.options, layout.exchanges, layout.freedom(), own_buckets)
    return merged(
        layout, [[layout.exchanges[each] for each in members] for members in decided], settings.style, context
    )


def cap_of(settings: Buckets) -> Cap:
    return lambda number: MB * (settings.first_mb if settings.first_mb and number == 0 else settings.cap_mb)


# --- which ------------------------------------------------------------------------------------------------------------


def runs_of(layout: Layout, kind: str, settings: Buckets) -> list[list[Exchange]]:
    """Collectives of a kind that could be one, in the order in which they are needed, or else can begin."""
    runs: dict[tuple[object, ...], list[Exchange]] = {}
    parameters = Parameters(layout) if settings.which == "fsdp" else None
    for exchange in layout.exchanges:
        if exchange.kind != kind:
            continue
        refusal = refusal_to_merge(exchange, settings.style)
        if refusal is None and parameters is not None:
            refusal = parameters.refuse(exchange)
        if refusal is not None:
            exchange.start.meta[WHY] = refusal.reason
            continue
        types = () if settings.style == "opaque_multidtype" else exchange.dtypes
        runs.setdefault((*exchange.key, types), []).append(exchange)
    jobs = {exchange: layout.job(exchange) for run in runs.values() for exchange in run}
    for run in runs.values():
        run.sort(key=lambda each: jobs[each].needed if kind == "all_gather" else jobs[each].available)
    return list(runs.values())


class Parameters:
    """Which collectives are of parameters, and of their gradients: gathers that lead back to one input, and sums that
    go on to outputs, one call after the other."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.inputs: dict[torch.fx.Node, torch.fx.Node | None] = {}  # the one that a node leads back to; None: several
        self.unary: dict[torch.fx.Node, bool] = {}  # whether all that follows a node takes one operand
        for node in layout.nodes:
            if node.op == "placeholder":
                self.inputs[node] = node
                continue
            sources = {self.inputs.get(operand) for operand in node.all_input_nodes}
            self.inputs[node] = sources.pop() if len(sources) == 1 else None
        for node in reversed(layout.nodes):
            follows = [user for user in node.users if user.op != "output"]
            self.unary[node] = all(len(user.all_input_nodes) == 1 and self.unary[user] for user in follows)

    def refuse(self, exchange: Exchange) -> Refusal | None:
        start = exchange.start
        if exchange.kind == "all_gather":
            return None if self.inputs.get(start) is not None else Refusal("it does not lead back to one input")
        return None if self.unary[start] and start.users else Refusal("more is done with its result than to return it")


def filled(run: Sequence[Exchange], layout: Layout, cap: Cap) -> list[list[Exchange]]:
    """Buckets, filled one after the other: each up to its own cap, and with members that can be one."""
    found: list[list[Exchange]] = []
    size, available, needed = 0, 0, 0
    for exchange in run:
        job, bytes_ = layout.job(exchange), max(exchange.given, exchange.result)
        fits = bool(found) and size + bytes_ <= cap(len(found) - 1)
        # What is first needed where a member begins is needed by that member: it can be in no bucket with it.
        first_needed = min(needed, job.needed)
        begins = fits and {layout.place[each.start] for each in (*found[-1], exchange)}
        if begins and max(available, job.available) <= first_needed and first_needed not in begins:
            found[-1].append(exchange)
            size, available, needed = size + bytes_, max(available, job.available), first_needed
        else:
            found.append([exchange])
            size, available, needed = bytes_, job.available, job.needed
    return [each for each in found if len(each) > 1]


# --- how large, by the cost model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    seconds: float
    buckets: list[list[Exchange]]


def best_buckets(layout: Layout, runs: list[list[Exchange]], machine: AnyMachine) -> list[list[Exchange]]:
    """The buckets with which the graph should be done first; none, if nothing is gained."""
    total = sum(max(each.given, each.result) for run in runs for each in run)
    held = layout.held()
    limit = limits_for(layout, Overlap()).memory
    plans = [_Plan(done_after(layout, [], machine), [])]
    tried: list[list[list[Exchange]]] = [[]]
    for first, last in (*zip(PARTS, PARTS, strict=True), *GROWING):
        largest = min(total / last, MAX_AUTO_MB * MB)
        smallest = min(total / first, largest)
        buckets = [each for run in runs for each in from_exposed_end(run, layout, smallest, largest)]
        if buckets not in tried and peak_with(layout, buckets, held) <= limit:
            plans.append(_Plan(done_after(layout, buckets, machine), buckets))
            tried.append(buckets)
    best = min(plans, key=lambda plan: plan.seconds)
    if best.seconds > plans[0].seconds - MIN_GAIN:
        for exchange in (run[0] for run in runs if len(run) == 1):
            exchange.start.meta.setdefault(WHY, "there is no other that it could be merged with")
        for exchange in itertools.chain.from_iterable(runs):
            exchange.start.meta.setdefault(WHY, "to merge it with others would gain nothing")
        return []
    return best.buckets


def from_exposed_end(run: Sequence[Exchange], layout: Layout, smallest: float, largest: float) -> list[list[Exchange]]:
    """Buckets that grow, each twice as large as the one before, up to the largest. The first gathers, and the last
    sums, have little beside them that hides them: small ones are over soon, and behind each a larger one has room."""

    def cap(number: int) -> float:
        return min(smallest * 2.0 ** min(number, 60), largest)

    if run[0].kind == "all_gather":
        return filled(run, layout, cap)
    return [members[::-1] for members in reversed(filled(run[::-1], layout, cap))]


def peak_with(layout: Layout, buckets: Iterable[Sequence[Exchange]], held: Sequence[float]) -> float:
    """Bytes that the graph would hold at its peak. A bucket of gathers is there from the first to the last need of a
    part, how long before is up to `overlap_scheduling`; one of sums from its first part on, as none can be given up
    before all are sent."""
    change = [0.0] * (len(held) + 1)
    for members in buckets:
        job, jobs = merged_job(members, layout), [layout.job(each) for each in members]
        is_gather = members[0].kind == "all_gather"
        begin, end = min(each.start for each in jobs), job.wait
        if is_gather:
            begin, end = job.needed, max(layout.last_need(wait) for each in members for wait in each.waits)
        size = sum(each.result if is_gather else each.given for each in members)
        change[begin] += size
        change[min(max(begin, end) + 1, len(held))] -= size
    more = itertools.accumulate(change)
    return max((both[0] + both[1] for both in zip(held, more, strict=False)), default=0.0)


def done_after(layout: Layout, buckets: Iterable[Sequence[Exchange]], machine: AnyMachine) -> float:
    """Seconds until a graph is done with such buckets, each collective where it is best."""
    member_of = {exchange: number for number, each in enumerate(buckets) for exchange in each}
    jobs: list[Job] = [layout.job(each) for each in layout.exchanges if each not in member_of]
    copying = 0.0
    for members in buckets:
        jobs.append(merged_job(members, layout))
        copying += 2 * sum(each.given + each.result for each in members) / machine.copy_bytes_per_second
    usual = Overlap()
    limits = Limits(in_flight=usual.in_flight_mb * MB, prefetch=usual.prefetch, work=layout.work, slack=usual.slack)
    placed = Placement(jobs, layout.clock, limits).placed()
    return forecast(placed, layout.clock).total + copying + len(jobs) * layout.network.call


def merged_job(members: Sequence[Exchange], layout: Layout) -> Job:
    jobs, first = [layout.job(each) for each in members], members[0]
    available, needed = max(job.available for job in jobs), min(job.needed for job in jobs)
    start = min(max(available, min(job.start for job in jobs)), needed)
    seconds = layout.network.seconds(first.kind, sum(each.size for each in members), first.shape)
    wait = max(start, min(job.wait for job in jobs))
    size = sum(job.size for job in jobs)
    kind = jobs[0].is_early, jobs[0].is_level
    return Job(jobs[0].channel, available, max(needed, wait), start, wait, seconds, size, *kind)


def waits_in(made: Sequence[torch.fx.Node], job: Job, context: PassContext) -> Iterator[tuple[int, torch.fx.Node]]:
    """The waits for a bucket, and where they stand: as soon as any member was waited for, if `overlap_scheduling` comes
    behind and puts them off until the bucket is over: what is sent can be given up then. Else where they are needed."""
    if chosen(context.options, "overlap", Overlap) is not None:
        yield from ((job.wait, node) for node in made if node.target is WAIT)


# --- in the graph -----------------------------------------------------------------------------------------------------


def merged(layout: Layout, buckets: Sequence[Sequence[Exchange]], style: str, context: PassContext) -> int:
    """Write buckets into the graph, in an order that is valid; how many collectives are no more."""
    if not buckets:
        return 0
    mode = mode_of(layout.graph)
    places, wanted, gone = dict(layout.place), [], 0
    for members in buckets:
        if not context.fuel.left:
            break
        context.fuel.spend()
        last = max((each.start for each in members), key=layout.place.__getitem__)
        begins = merged_job(members, layout).available
        made = Merge(members, style, layout.graph, mode, last).write()
        places |= dict.fromkeys(made, layout.place[last])
        if (
            members[0].kind != "all_gather"
        ):  # those are best where they are needed, which is where they go by themselves
            wanted.append((begins, next(node for node in made if MEMBERS in node.meta)))
            wanted += waits_in(made, merged_job(members, layout), context)
        gone += len(members) - 1
        context.count(f"bucket_{members[0].kind}")
    in_buckets = {exchange for members in buckets for exchange in members}
    rewrite_order(layout.graph, places, [*wanted, *layout.kept(in_buckets)])
    return gone
