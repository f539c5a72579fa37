"""The collectives of a graph: what each is, how much it moves among whom, and where it begins and ends.

Nodes are known by the operators they call. A collective is one node that starts it and one that waits for each of its
results; some have lists of tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api, torch_runtime
from ferrite.graph import argument, fake_value, leaves, model_line, storage_bytes
from ferrite.machines import GroupShape

KINDS: Mapping[str, str] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "isend": "send",
    "irecv": "send",
    "batch_p2p_ops": "send",
}
BY_TARGET: dict[Any, str] = {
    target: kind
    for name, kind in KINDS.items()
    if (target := torch_api.find_operator(f"_c10d_functional.{name}.default")) is not None
}
ALL_GATHER = torch_api.find_operator("_c10d_functional.all_gather_into_tensor.default")
REDUCE_SCATTER = torch_api.find_operator("_c10d_functional.reduce_scatter_tensor.default")
ALL_REDUCE = torch_api.find_operator("_c10d_functional.all_reduce.default")
WAIT = torch_api.find_operator("_c10d_functional.wait_tensor.default")
# Among the metadata of a start: why a pass left it as it is, in the words of the report; and how many were merged.
WHY = "why_not_moved"
MEMBERS = "members_of_bucket"
# And that it is a part of one that was taken apart, so that nobody puts it together again.
PART = "part_of_collective"


COPIES = {ALL_GATHER: "_low_contention_all_gather", REDUCE_SCATTER: "_low_contention_reduce_scatter"}


def copies_of(target: Any) -> Any | None:
    """The operator that does the same by copies in memory that ranks share, a collective from then on: torch defines it
    when that memory is first asked for."""
    name = COPIES.get(target)
    found = torch_api.find_operator(f"symm_mem.{name}.default") if name is not None else None
    if found is not None:
        BY_TARGET[found] = BY_TARGET[target]
    return found


@dataclass(frozen=True, eq=False)
class Exchange:
    """One collective. `size`: bytes as the cost model counts them, what an all-gather gives, what others take. `given`
    and `result`: bytes of memory that it reads, and that it writes."""

    start: torch.fx.Node
    waits: tuple[torch.fx.Node, ...]
    kind: str
    group: str
    shape: GroupShape
    reduce_op: str
    dtypes: tuple[torch.dtype, ...]
    given: int
    result: int
    device: torch.device

    @property
    def size(self) -> int:
        return self.result if self.kind == "all_gather" else self.given

    @property
    def is_copies(self) -> bool:
        """Whether it is done by copies in memory that ranks share."""
        return str(self.start.target).startswith("symm_mem.")

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal among those that become one."""
        return (self.kind, self.group, self.reduce_op, str(self.device))

    @property
    def where(self) -> str:
        line = model_line(self.start)
        return str(line) if line is not None else self.start.name


def exchanges_in(graph: torch.fx.Graph) -> list[Exchange]:
    """In the order in which they start. Left out: those whose group has no name, or whose results nobody waits for."""
    return [found for node in graph.nodes if node.target in BY_TARGET and (found := exchange_of(node)) is not None]


def exchange_of(start: torch.fx.Node) -> Exchange | None:
    kind, group = BY_TARGET[start.target], argument(start, "group_name")
    waits = tuple(waits_of(start))
    if not isinstance(group, str) or not waits:
        return None
    given = [leaf for operand in start.all_input_nodes for leaf in leaves(fake_value(operand)) if is_tensor(leaf)]
    results = [leaf for leaf in leaves(fake_value(start)) if is_tensor(leaf)]
    if not given or not results:
        return None
    size = argument(start, "group_size")
    return Exchange(
        start,
        waits,
        kind,
        group,
        shape_of(group, size if isinstance(size, int) else None),
        str(argument(start, "reduce_op") or ""),
        tuple(dict.fromkeys(tensor.dtype for tensor in given)),
        sum(map(bytes_of, given)),
        sum(map(bytes_of, results)),
        results[0].device,
    )


def waits_of(start: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for user in start.users:
        if user.target is WAIT:
            yield user
        elif user.target is operator.getitem:
            yield from (each for each in user.users if each.target is WAIT)


def shape_of(group: str, size: int | None) -> GroupShape:
    """Of a group that this process does not know, as its size says."""
    ranks = torch_runtime.ranks_of_group(group)
    return GroupShape.of(ranks) if ranks is not None else GroupShape(size or 1)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def bytes_of(value: torch.Tensor) -> int:
    """At the sizes seen, where they are not known."""
    return torch_api.size_hint(storage_bytes(value))
