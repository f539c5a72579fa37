"""What the option `distributed` says: which passes may change collectives, and their settings.

`"auto"` is a preset: what keeps results, decided by the cost model of the network. Names ask for passes and no others,
and what these are told is what they do, whatever it costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ferrite.errors import UserError
from ferrite.machines import InvalidNetwork, Network, network_of, parse_network
from ferrite.options import NoSettings, Options, at_least, check_choices, choice_of, settings_of
from ferrite.passes.post_grad.distributed.agreement import all_share_memory
from ferrite.passes.post_grad.distributed.exchanges import exchanges_in

S = TypeVar("S")
MB = 1e6  # bytes


@dataclass(frozen=True)
class Buckets:
    """`which`: all, or those of parameters and their gradients. `cap_mb`: of a bucket; `first_mb`: of the first, where
    that is to be smaller. `style`: how members are packed, `traced` as operators of the graph, which become part of
    kernels, `opaque` as one call (but for reduce-scatters, of which each rank has a part of every member),
    `opaque_multidtype` as bytes of any types, `coalesced` not at all, by a collective on a list."""

    which: Literal["all", "fsdp"] = "all"
    style: Literal["traced", "opaque", "opaque_multidtype", "coalesced"] = "traced"
    cap_mb: float = at_least(0, 2000.0)
    first_mb: float = at_least(0, 0.0)


@dataclass(frozen=True)
class DdpFuse:
    """Megabytes of a bucket behind the first, which has one; with `auto` the cost model says. How gradients are packed;
    whether waits are put off."""

    bucket_mb: float = at_least(0, 25.0)
    style: Literal["concat", "coalesced"] = "concat"
    delay_waits: bool = True


@dataclass(frozen=True)
class AsyncTp:
    """Into how many parts products and the collectives beside them are taken apart, where ranks share no memory."""

    chunks: int = at_least(2, 2)


@dataclass(frozen=True)
class LowContention:
    """Megabytes of a rank from which on a collective leaves the processors to what is computed. `ignore_overlap`: also
    where nothing is computed meanwhile."""

    min_mb: float = at_least(0, 16.0)
    ignore_overlap: bool = False


@dataclass(frozen=True)
class Overlap:
    """`in_flight_mb`: of collectives that have begun and are not over. `prefetch`: matrix products and the like that a
    collective may begin ahead of. `memory_mb` and `memory_percent`: how much more the graph may hold at its peak, the
    greater of both; `limits_memory`: whether that counts at all. `compute`: how much longer computing takes than was
    thought. `slack`: by which part of its time a collective may take longer and still be hidden."""

    in_flight_mb: float = at_least(0, 5000.0)
    prefetch: int = at_least(0, 200)
    memory_mb: float = at_least(0, 1000.0)
    memory_percent: float = at_least(0, 5.0)
    limits_memory: bool = True
    compute: float = at_least(0, 1.0)
    slack: float = at_least(0, 1.0)


@dataclass(frozen=True)
class SpmdCheck:
    """What a difference between ranks does."""

    on_mismatch: Literal["warn", "raise"] = "raise"


# Every name that the option may hold, with the settings it takes.
SETTINGS: Mapping[str, type[Any]] = {
    "async_tp": AsyncTp,
    "ddp_fuse": DdpFuse,
    "spmd_check": SpmdCheck,
    "decompose_comms": NoSettings,
    "dedup_reduce_scatter": NoSettings,
    "bucket_rs": Buckets,
    "bucket_ar": Buckets,
    "bucket_ag": Buckets,
    "overlap": Overlap,
    "low_contention": LowContention,
}
IN_SHARED_MEMORY = ("async_tp", "low_contention")  # what they do depends on whether ranks share memory
AUTO = frozenset({"ddp_fuse", "spmd_check", "dedup_reduce_scatter", "bucket_rs", "bucket_ar", "bucket_ag", "overlap"})


def check_distributed(options: Options) -> None:
    """Every name in `distributed`, and every setting beside it, is one that somebody reads."""
    if not isinstance(options.distributed, str):
        check_choices("distributed", options.distributed, SETTINGS, "pass")


def chosen(options: Options, name: str, kind: type[S]) -> S | None:
    """The settings of a pass; None where it is not to run."""
    if isinstance(options.distributed, str):
        return kind() if options.distributed == "auto" and name in AUTO else None
    return settings_of(options.distributed, name, kind) if choice_of(options.distributed, name) is not None else None


def is_auto(options: Options) -> bool:
    """Whether the cost model decides."""
    return options.distributed == "auto"


def network_for(options: Options, device: torch.device) -> Network:
    """What communication costs: as the file says that the options name, else as usual on a device."""
    return network_of(device.type) if options.network is None else read_network(options.network)


def read_network(path: Path) -> Network:
    try:
        return parse_network(path.read_text())
    except (OSError, UnicodeDecodeError, InvalidNetwork) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise UserError(
            f"option 'network' names {str(path)!r}, which is no network record",
            {"because": reason, "to make one": "torchrun --nproc-per-node 2 -m ferrite comm-bench network.txt"},
        ) from None


def communication_identity(graph: torch.fx.Graph, options: Options) -> str:
    """What else decisions about the collectives of a graph rest on, for the cache key: groups, the network, and
    memory that ranks share, if anything is asked for that needs it."""
    shapes = {each.group: f"{each.shape.size}/{each.shape.stride}" for each in exchanges_in(graph)}
    if any(chosen(options, name, SETTINGS[name]) is not None for name in IN_SHARED_MEMORY):
        shapes = {group: f"{shape} {'shared' if all_share_memory(group) else ''}" for group, shape in shapes.items()}
    network = "" if options.network is None else hashlib.sha256(str(read_network(options.network)).encode()).hexdigest()
    return " ".join([*(f"{group} {shape}" for group, shape in sorted(shapes.items())), network])
