"""What the collectives of a graph do and cost, as plain data for the record: as captured, and as they are after passes.

All times are forecasts of the cost model. They need no process but this one: in a process group of torch's backend
`fake` they say what a step would look like on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.errors import ModelLine
from ferrite.graph import argument, describe_value, fake_value, has_collectives, leaves, model_line
from ferrite.machines import AnyMachine, Network
from ferrite.options import Options
from ferrite.passes.post_grad.distributed.agreement import DECISIONS, signature
from ferrite.passes.post_grad.distributed.exchanges import MEMBERS, WHY, bytes_of, is_tensor
from ferrite.passes.post_grad.distributed.node_order import Layout
from ferrite.passes.post_grad.distributed.overlap import layout_of
from ferrite.passes.post_grad.distributed.shared_memory import is_product_in_shared_memory
from ferrite.passes.post_grad.distributed.timeline import forecast


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective: what it moves among how many ranks, when it is on its way, for how long it is waited for, and why
    it was not moved further or merged. `signature`: what must be equal on all ranks."""

    kind: str
    group: str
    ranks: int
    between_machines: bool
    bytes: int
    members: int
    about: str
    node: str
    line: ModelLine | None
    begin: float
    end: float
    exposed: float
    why: str
    signature: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class InProductRecord:
    """A collective that is part of a product, in memory that ranks share: over when the product is."""

    group: str
    node: str
    line: ModelLine | None
    signature: str


@dataclass(frozen=True)
class CapturedCommunication:
    """The collectives before passes: how many, their seconds, and for how many of them one would wait."""

    collectives: int
    seconds: float
    exposed: float


@dataclass(frozen=True)
class CommunicationRecord:
    """The collectives of a graph, in the order in which they begin; what computing takes, and all of it. `decisions`:
    what the ranks of a job have agreed on. `in_products`: those that products do themselves."""

    collectives: tuple[CollectiveRecord, ...]
    compute_seconds: float
    total_seconds: float
    captured: CapturedCommunication
    decisions: Mapping[str, str] = field(default_factory=dict)
    in_products: tuple[InProductRecord, ...] = ()

    @property
    def seconds(self) -> float:
        """Of collectives, one after the other."""
        return sum(each.seconds for each in self.collectives)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed, as something is waited for."""
        return sum(each.exposed for each in self.collectives)

    @property
    def hidden(self) -> float:
        """The part of communication that nobody waits for, from 0 to 1."""
        return 1.0 if not self.seconds else max(1 - self.exposed / self.seconds, 0.0)


NOTHING_CAPTURED = CapturedCommunication(0, 0.0, 0.0)


def captured_communication(
    gm: torch.fx.GraphModule, options: Options, network: Network | None = None, machine: AnyMachine | None = None
) -> CapturedCommunication | None:
    """What the collectives of a graph cost as they are; None where it has none."""
    if not has_collectives(gm.graph):
        return None
    layout = layout_of(gm.graph, options, network=network, machine=machine, in_place=True)
    if layout is None:
        return NOTHING_CAPTURED
    jobs = [layout.job(exchange) for exchange in layout.exchanges]
    return CapturedCommunication(len(jobs), sum(job.seconds for job in jobs), forecast(jobs, layout.clock).waiting)


def communication_of(
    gm: torch.fx.GraphModule,
    options: Options,
    captured: CapturedCommunication | None,
    network: Network | None = None,
    machine: AnyMachine | None = None,
) -> CommunicationRecord | None:
    """The record of a graph after passes; None where it had none before."""
    if captured is None:
        return None
    layout = layout_of(gm.graph, options, network=network, machine=machine, in_place=True)
    decisions = dict(gm.meta.get(DECISIONS, {}))
    in_products = tuple(in_product(node) for node in gm.graph.nodes if is_product_in_shared_memory(node))
    if layout is None:
        return CommunicationRecord((), 0.0, 0.0, captured, decisions, in_products)
    jobs = [layout.job(exchange) for exchange in layout.exchanges]
    found = forecast(jobs, layout.clock)
    records = []
    for number, exchange in enumerate(layout.exchanges):
        tensors = [
            leaf for each in exchange.start.all_input_nodes for leaf in leaves(fake_value(each)) if is_tensor(leaf)
        ]
        records.append(
            CollectiveRecord(
                exchange.kind,
                exchange.group,
                exchange.shape.size,
                layout.network.crosses_machines(exchange.shape),
                exchange.size,
                exchange.start.meta.get(MEMBERS, 1),
                " ".join(filter(None, [exchange.reduce_op, *map(describe_value, tensors[:1])])),
                exchange.start.name,
                model_line(exchange.start),
                found.begin[number],
                found.end[number],
                found.exposed[number],
                reason(exchange.start.meta.get(WHY), found.exposed[number], layout, number),
                signature(exchange),
            )
        )
    return CommunicationRecord(tuple(records), layout.clock[-1], found.total, captured, decisions, in_products)


def in_product(node: torch.fx.Node) -> InProductRecord:
    """What is sent in a product: rows before it, or its own. Columns of a gathered product are each rank's own."""
    name = str(node.target).split(".")[1]
    is_gather = "gather" in name
    sent: Any = fake_value(node.all_input_nodes[0] if is_gather else node)
    how = "" if is_gather else f"{argument(node, 'reduce_op')} "
    dim = argument(node, "gather_dim" if is_gather else "scatter_dim")
    signature = f"{name} {how}along {dim} of {sent.dtype} {bytes_of(sent)}"
    return InProductRecord(str(argument(node, "group_name")), node.name, model_line(node), signature)


def reason(noted: str | None, exposed: float, layout: Layout, number: int) -> str:
    """Why a collective is waited for, or was not merged."""
    if noted is not None:
        return noted
    job = layout.job(layout.exchanges[number])
    if exposed <= 0:
        return ""
    room = layout.clock[job.needed] - layout.clock[job.available]
    if room < job.seconds:
        takes = f"it takes {job.seconds * 1e6:.0f} us"
        return f"{takes}, and from what it needs to who needs it {room * 1e6:.0f} us are computed"
    return "others of its group are on their way"
