"""What communication between processes costs: seconds of a collective, by its kind, its bytes and its group.

    network record
    where: nccl, torch 2.13.0, 64 ranks
    ranks per machine: 8
    call: 25.0 us

    inside a machine
        all_gather: 12.0 us, 300.00 GB/s
        all_reduce: 14.0 us, 290.00 GB/s
    between machines
        all_gather: 30.0 us, 40.00 GB/s

A collective takes a latency for each step that its messages are passed on, and the bytes that a rank sends over the
bandwidth of its link; and whoever begins it and waits for it is held up by the two calls, however well it is hidden.
Latency and bandwidth are those of the slowest link of the group: inside a machine or between machines, for each kind of
collective, or `any` for those that were not measured. `python -m ferrite comm-bench` writes such a record; the option
`network` names one; without, there are `NETWORKS`.

What is asked here must give one answer on every rank, since all ranks decide by it: so a group is known by how many
ranks it has and how far these are apart, which is the same for all groups of one dimension of a mesh, and never by
which ranks they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

TITLE = "network record"
ANY = "any"
# Kinds of collectives, and how often the whole of their bytes crosses a link, but for the share of a rank.
TRAFFIC: Mapping[str, float] = {
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,  # a reduce-scatter, then an all-gather
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "send": 1.0,
}
PLACES = ("inside a machine", "between machines")
LINK = re.compile(r"(\w+): (\d+(?:\.\d+)?) us, (\d+(?:\.\d+)?) GB/s")
CALL = re.compile(r"(\d+(?:\.\d+)?) us")
CALL_SECONDS = 4e-6  # where a record says nothing of it


class InvalidNetwork(ValueError):
    """A text that is no network record: what is wrong, and on which line."""


@dataclass(frozen=True)
class Link:
    """Seconds until the first byte of a step arrives, and bytes a second from then on."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class GroupShape:
    """What is known of a process group: how many ranks, and how far one is from the next.

    >>> GroupShape.of([0, 8, 16, 24])
    GroupShape(size=4, stride=8)
    """

    size: int
    stride: int = 1

    @staticmethod
    def of(ranks: Sequence[int]) -> GroupShape:
        return GroupShape(len(ranks), abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1)


@dataclass(frozen=True)
class Network:
    """`inside` a machine and `between` machines: links by the kind of collective, `any` for others. `call`: seconds
    that to begin a collective and to wait for one that is over take together."""

    inside: Mapping[str, Link] = field(hash=False)
    between: Mapping[str, Link] = field(hash=False)
    ranks_per_machine: int = 8
    where: str = ""
    call: float = CALL_SECONDS

    def link(self, kind: str, group: GroupShape) -> Link:
        links = self.between if self.crosses_machines(group) else self.inside
        return links.get(kind) or links[ANY]

    def crosses_machines(self, group: GroupShape) -> bool:
        """Whether some group of this shape has ranks on two machines."""
        return (group.size - 1) * group.stride >= self.ranks_per_machine

    def seconds(self, kind: str, size: int, group: GroupShape) -> float:
        """Of a collective with so many bytes in all: of an all-gather what it gives, of a reduce-scatter what it takes,
        of the others what a rank takes."""
        if group.size < 2:
            return 0.0
        link = self.link(kind, group)
        share = 1.0 if kind in ("broadcast", "send") else (group.size - 1) / group.size
        return link.latency * steps(kind, group.size) + TRAFFIC.get(kind, 1.0) * share * size / link.bandwidth

    def __str__(self) -> str:
        lines = [TITLE, f"where: {self.where}", f"ranks per machine: {self.ranks_per_machine}"]
        lines.append(f"call: {self.call * 1e6:.1f} us")
        for place, links in zip(PLACES, (self.inside, self.between), strict=True):
            lines += ["", place]
            for kind, link in links.items():
                lines.append(f"    {kind}: {link.latency * 1e6:.1f} us, {decimal(link.bandwidth / 1e9)} GB/s")
        return "\n".join(lines) + "\n"


def steps(kind: str, ranks: int) -> int:
    """How often a message is passed on: messages that are so small that this matters go along a tree."""
    return 1 if kind in ("send", "all_to_all") else max(math.ceil(math.log2(ranks)), 1)


def decimal(number: float) -> str:
    """With two decimals, and more of them where less than three digits were left: 300.00, 0.00123."""
    digits = 2 if number >= 1 else 2 - math.floor(math.log10(number))
    return f"{number:.{digits}f}"


def parse_network(text: str) -> Network:
    """The network that a text describes; InvalidNetwork where it is none."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or lines[0][1] != TITLE:
        raise InvalidNetwork(f"line 1: a record begins with {TITLE!r}")
    head: dict[str, str] = {}
    links: dict[str, dict[str, Link]] = {}
    place = None
    for number, line in lines[1:]:
        if line in PLACES:
            place = line
            links.setdefault(place, {})
        elif place is None:
            name, found, value = line.partition(":")
            if not found or name not in ("where", "ranks per machine", "call"):
                raise InvalidNetwork(f"line {number}: {line!r} is neither 'where', 'ranks per machine' nor 'call'")
            head[name] = value.strip()
        else:
            add_link(links[place], number, line)
    ranks = head.get("ranks per machine", "")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise InvalidNetwork(f"'ranks per machine' is {ranks!r}, and should be a whole number from 1")
    call = CALL.fullmatch(head.get("call", f"{CALL_SECONDS * 1e6:.1f} us"))
    if call is None:
        raise InvalidNetwork(f"'call' is {head['call']!r}, and should be as '25.0 us'")
    for name in PLACES:
        if not links.get(name):
            raise InvalidNetwork(f"it says nothing of links {name}")
        links[name].setdefault(ANY, slowest(links[name].values()))
    return Network(links[PLACES[0]], links[PLACES[1]], int(ranks), head.get("where", ""), float(call[1]) / 1e6)


def add_link(links: dict[str, Link], number: int, line: str) -> None:
    found = LINK.fullmatch(line)
    if found is None or (found[1] not in TRAFFIC and found[1] != ANY) or float(found[3]) == 0:
        known = ", ".join([*TRAFFIC, ANY])
        raise InvalidNetwork(
            f"line {number}: {line!r} is no link, as 'all_gather: 12.0 us, 300.00 GB/s'; kinds: {known}"
        )
    links[found[1]] = Link(float(found[2]) / 1e6, float(found[3]) * 1e9)


def slowest(links: Iterable[Link]) -> Link:
    found = list(links)
    return Link(max(link.latency for link in found), min(link.bandwidth for link in found))


def fitted(times: Mapping[int, float]) -> Link:
    """The latency and the bandwidth that explain measured seconds by bytes best, none of them negative: relative to
    each time, so that small messages count as much as large ones.

    >>> link = fitted({size: 1e-5 + size / 1e9 for size in (1 << 10, 1 << 16, 1 << 24)})
    >>> round(link.latency * 1e6), round(link.bandwidth / 1e9)
    (10, 1)
    """
    sizes = sorted(times)
    weights = {size: 1 / times[size] ** 2 for size in sizes}
    total = sum(weights.values())
    mean_size = sum(weights[size] * size for size in sizes) / total
    mean_time = sum(weights[size] * times[size] for size in sizes) / total
    spread = sum(weights[size] * (size - mean_size) ** 2 for size in sizes)
    slope = sum(weights[size] * (size - mean_size) * (times[size] - mean_time) for size in sizes) / spread
    slope = max(slope, 1e-15)
    return Link(max(mean_time - slope * mean_size, 1e-7), 1 / slope)


# Eight GPUs to a machine, with links as they are sold (NVLink of the fourth generation: 450 GB/s each way; a port of
# 400 Gbit/s for each GPU), of which collectives get about two thirds and four fifths. Not measured here.
GPUS = Network(
    inside={ANY: Link(8e-6, 300e9)},
    between={ANY: Link(20e-6, 40e9)},
    where="NVLink and 400 Gbit/s for each GPU, assumed",
    call=20e-6,  # through torch's dispatcher and its process group; assumed
)
# Processes on one machine through gloo's loopback, by `python -m ferrite comm-bench` with two ranks on two cores of a
# Neoverse N1; between machines 10 Gbit/s are assumed.
CPUS = Network(
    inside={ANY: Link(200e-6, 1e9)},
    between={ANY: Link(250e-6, 1e9)},
    where="gloo on one machine, and 10 Gbit/s between machines, assumed",
    call=130e-6,  # measured on two cores of a Xeon at 2.5 GHz: 85 to begin, 45 to wait for what is over
)
NETWORKS: Mapping[str, Network] = {"cpu": CPUS, "cuda": GPUS}


def network_of(device: str) -> Network:
    """By the type of a device; what nobody has measured is taken for GPUs."""
    return NETWORKS.get(device, GPUS)
