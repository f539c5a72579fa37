"""A graph as a timeline has it: places of nodes, what floats between them, and how to write another order down.

Most nodes stay in their order. Collectives, their waits, and the views and copies that lead to the one and from the
other float: each is written where it is placed, or where somebody needs it, whichever comes first. A node that writes
holds everything back that stood before it.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence

import torch

from ferrite.graph import GraphCycle, Storage, fake_value, leaves, mutates, storages_of, stream_of
from ferrite.machines import AnyMachine, Network
from ferrite.passes.post_grad.distributed.compute_times import is_light, is_view_call, operations_of, seconds_of
from ferrite.passes.post_grad.distributed.exchanges import BY_TARGET, WAIT, Exchange, bytes_of, exchanges_in, is_tensor
from ferrite.passes.post_grad.distributed.timeline import Job

SHRINKS = ("reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


class Layout:
    """One graph. `place` counts nodes from the first to the output. `in_place`: collectives that write their operands
    are among its exchanges, though they cannot be moved."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        network: Network,
        machine: AnyMachine,
        compute: float = 1.0,
        in_place: bool = False,
    ) -> None:
        self.graph, self.network = graph, network
        self.nodes = list(graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.exchanges = [each for each in exchanges_in(graph) if in_place or not mutates(each.start)]
        self.begins = {exchange.start for exchange in self.exchanges}
        self.writes = [place for place, node in enumerate(self.nodes) if mutates(node)]
        operations = {node: operations_of(node) for node in self.nodes}
        seconds = [compute * seconds_of(node, machine, operations[node]) for node in self.nodes]
        self.clock = [0.0, *itertools.accumulate(seconds)][: len(self.nodes)]
        self.work = [0, *itertools.accumulate(int(operations[node] > 0) for node in self.nodes)][: len(self.nodes)]
        self.channels: dict[str, int] = {}
        for exchange in self.exchanges:
            self.channels.setdefault(exchange.group, len(self.channels))
        self.jobs: dict[Exchange, Job] = {}
        self.inputs = len(list(itertools.takewhile(is_input, self.nodes)))
        self.available, self.waited = self.earliest()
        self.needed = self.latest()

    def earliest(self) -> tuple[dict[torch.fx.Node, int], set[torch.fx.Node]]:
        """For each node the place behind which it could stand if views and copies before it stood as early as they
        can; and the nodes for which that is behind a wait."""
        found: dict[torch.fx.Node, int] = {}
        waited: set[torch.fx.Node] = set()
        for place, node in enumerate(self.nodes):
            operands = node.all_input_nodes
            if node.op in ("placeholder", "get_attr"):
                found[node] = -1
            elif node in self.begins or is_light(node):
                found[node] = max((found[operand] for operand in operands), default=-1)
                if any(operand in waited for operand in operands):
                    waited.add(node)
            else:
                found[node] = place
                if node.target is WAIT:
                    waited.add(node)
        return found, waited

    def latest(self) -> dict[torch.fx.Node, int]:
        """For each node the place of the first that needs it and cannot stand later."""
        found: dict[torch.fx.Node, int] = {}
        end = len(self.nodes) - 1
        for node in reversed(self.nodes):
            later = [found[user] if is_light(user) else self.place[user] for user in node.users]
            found[node] = min(later, default=end)
        return found

    def job(self, exchange: Exchange) -> Job:
        """A collective as a timeline has it. Each is asked for whenever other buckets are tried."""
        if exchange not in self.jobs:
            self.jobs[exchange] = self.made_job(exchange)
        return self.jobs[exchange]

    def made_job(self, exchange: Exchange) -> Job:
        start, wait = self.place[exchange.start], min(self.place[each] for each in exchange.waits)
        available = start if exchange.start in self.waited else self.first_place(exchange.start)
        needed = min(self.last_place(each) for each in exchange.waits)
        return Job(
            self.channels[exchange.group],
            min(available, start),
            max(needed, wait),
            start,
            wait,
            self.network.seconds(exchange.kind, exchange.size, exchange.shape),
            exchange.given if exchange.kind == "reduce_scatter" else exchange.result,
            exchange.kind in SHRINKS,
            exchange.kind == "all_reduce",
        )

    def freedom(self) -> str:
        """Which collectives can begin before which are needed, from left to right: `+2` where the third can begin, `-0`
        where the first is needed. Graphs in which this is equal let the same ones be merged, and begin in the same
        order, however long they take."""
        jobs = [self.job(exchange) for exchange in self.exchanges]
        events = [(job.available, "+", number) for number, job in enumerate(jobs)]
        events += [(job.needed, "-", number) for number, job in enumerate(jobs)]
        return " ".join(f"{sign}{number}" for _, sign, number in sorted(events))  # of one place, `+` first

    def first_place(self, start: torch.fx.Node) -> int:
        """The first place that a collective may begin at: behind its operands, and behind the last write before it."""
        before = bisect.bisect_left(self.writes, self.place[start])
        return max(self.available[start] + 1, self.writes[before - 1] + 1 if before else 0, self.inputs)

    def last_place(self, wait: torch.fx.Node) -> int:
        after = bisect.bisect_right(self.writes, self.place[wait])
        return min(self.needed[wait], self.writes[after] if after < len(self.writes) else len(self.nodes) - 1)

    def last_need(self, wait: torch.fx.Node) -> int:
        """The last place at which a result is read, itself or through views and copies."""
        found, pending, seen = self.place[wait], [wait], {wait}
        while pending:
            for user in pending.pop().users:
                found = max(found, self.place[user])
                if is_light(user) and user not in seen:
                    seen.add(user)
                    pending.append(user)
        return found

    def held(self) -> list[float]:
        """Bytes of results that are alive when each node has run, beyond the inputs; views take none."""
        last: dict[Storage, int] = {}
        size: dict[Storage, int] = {}
        born: dict[Storage, int] = {}
        given: set[Storage] = set()
        of_node: dict[torch.fx.Node, frozenset[Storage]] = {}
        for place, node in enumerate(self.nodes):
            storages = of_node[node] = storages_of(node)
            if node.op in ("placeholder", "get_attr"):
                given |= storages
            for storage in storages:
                last[storage] = place
                if storage not in given and storage not in born and not is_view_call(node):
                    born[storage] = place
                    size[storage] = sum(bytes_of(leaf) for leaf in leaves(fake_value(node)) if is_tensor(leaf))
            if node.target is operator.getitem:
                continue  # one of several results: whoever reads it is the one that counts
            for operand in node.all_input_nodes:
                last.update(dict.fromkeys(of_node[operand], place))
        change = [0.0] * (len(self.nodes) + 1)
        for storage, place in born.items():
            change[place] += size[storage]
            change[last[storage] + 1] -= size[storage]
        return list(itertools.accumulate(change))[: len(self.nodes)]

    def kept(self, gone: Collection[Exchange]) -> list[tuple[int, torch.fx.Node]]:
        """Where the other exchanges stand, for an order in which they stay there."""
        nodes = (node for each in self.exchanges if each not in gone for node in (each.start, *each.waits))
        return [(self.place[node], node) for node in nodes]

    @property
    def has_streams(self) -> bool:
        return any(stream_of(node) is not None for node in self.nodes)


def is_input(node: torch.fx.Node) -> bool:
    return node.op == "placeholder"


def floating(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Collectives, their waits, and views and copies that only lead to the ones or come from the others."""
    found = {node for node in nodes if (node.target in BY_TARGET or node.target is WAIT) and not mutates(node)}
    for node in nodes:  # from waits on
        if is_light(node) and node.all_input_nodes and all(each in found for each in node.all_input_nodes):
            found.add(node)
    for node in reversed(nodes):  # towards collectives
        if is_light(node) and node.users and all(user in found for user in node.users):
            found.add(node)
    return found


def parts_that_leave(nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each wait, the copies of parts of its result that the graph returns, themselves or as views: gradients, and
    what is saved for the backward graph. They are made at once, as the whole can be given up then."""
    region = 0
    regions: dict[torch.fx.Node, int] = {}
    of_wait: dict[torch.fx.Node, torch.fx.Node] = {}  # by what comes from it alone, through views and copies
    for node in nodes:
        region += mutates(node)
        regions[node] = region
        operands = node.all_input_nodes
        if node.target is WAIT:
            of_wait[node] = node
        elif is_light(node) and len(operands) == 1 and operands[0] in of_wait:
            of_wait[node] = of_wait[operands[0]]
    leaves_graph: set[torch.fx.Node] = set()
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in reversed(nodes):
        if any(user.op == "output" or (is_view_call(user) and user in leaves_graph) for user in node.users):
            leaves_graph.add(node)
            wait = of_wait.get(node)
            is_copy = not is_view_call(node) and node.target is not operator.getitem and node.target is not WAIT
            if wait is not None and is_copy and regions[node] == regions[wait]:
                found.setdefault(wait, []).insert(0, node)
    return found


def rewrite_order(
    graph: torch.fx.Graph,
    old: Mapping[torch.fx.Node, int],
    wanted: Sequence[tuple[int, torch.fx.Node]],
    in_order: Sequence[torch.fx.Node] = (),
) -> int:
    """Write the nodes in another order: those that are `wanted` before what stood at a place are there, copies of parts
    that leave the graph behind the wait for the whole, other floating ones where they are needed, and the rest as
    before. `old`: the places that nodes had; `in_order`: nodes that follow each other, wherever they are. How many
    moved."""
    previous = {node: first for first, node in itertools.pairwise(in_order)}
    nodes = list(graph.nodes)
    floats = floating(nodes)
    leaving = parts_that_leave(nodes)
    pending = sorted((node for node in floats if node in old), key=lambda node: old[node])
    order: list[torch.fx.Node] = []
    done: set[torch.fx.Node] = set()
    held_back, placed = 0, 0
    wanted = sorted(wanted, key=lambda each: each[0])  # stable: of one place, in the order given

    def emit(first: torch.fx.Node) -> None:
        stack, open_nodes = [first], set[torch.fx.Node]()
        while stack:
            node = stack[-1]
            needed = [*node.all_input_nodes, *([previous[node]] if node in previous else ())]
            missing = [operand for operand in needed if operand not in done]
            if node in done:
                stack.pop()
            elif missing:
                if node in open_nodes:
                    raise GraphCycle(f"{node.name} cannot begin in the order that other ranks have", [node])
                open_nodes.add(node)
                stack += reversed(missing)
            else:
                stack.pop()
                done.add(node)
                order.append(node)
                for part in leaving.get(node, ()):
                    emit(part)

    for node in nodes:
        if node in floats:
            continue
        place = old.get(node)
        while place is not None and placed < len(wanted) and wanted[placed][0] <= place:
            emit(wanted[placed][1])
            placed += 1
        if node.op == "output" or mutates(node):
            while held_back < len(pending) and (node.op == "output" or old[pending[held_back]] < (place or 0)):
                emit(pending[held_back])
                held_back += 1
        emit(node)
    for node in nodes:  # what nobody reads and nobody placed
        if node not in done:
            output = order.pop()
            emit(node)
            order.append(output)
    if order == nodes:
        return 0
    moved = sum(old_one is not new_one for old_one, new_one in zip(nodes, order, strict=True))
    for left, right in itertools.pairwise(order):
        if left.next is not right:
            left.append(right)
    return moved
