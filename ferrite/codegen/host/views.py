"""Views that only calls of a host program see.

Most products of a model read a view of their operands: rows of a batch as one matrix, a weight the other way round. As
a view of torch's own each costs as much as half of the product itself, on the host. Where nobody can tell the
difference it is an untracked view: a tensor in the same memory that autograd knows nothing of. Equal ones are made
once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from ferrite.codegen.host.pieces import tensors_of
from ferrite.ir.program import Operation, call_of
from ferrite.schedule import BufferTable, Plan, Run, accessed


@dataclass
class UntrackedViews:
    """`stands_for`: for each of them the first one that is equal to it. `left`: how many of these are still needed."""

    stands_for: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def is_over(self, name: str) -> bool:
        """Whether a view is free, with all that are equal to it, now that this one is not needed any more."""
        first = self.stands_for[name]
        self.left[first] -= 1
        return not self.left[first]


def untracked_views_of(plan: Plan, table: BufferTable, parts: Mapping[int, int]) -> UntrackedViews:
    """`parts`: the part of each step, by its place, where parts are recorded: views do not go from one to another."""
    read: dict[str, int] = {}  # views, and the steps that they are made for
    seen = {item for item in plan.program.outputs if isinstance(item, str)}
    for place, step in enumerate(plan.steps):
        if not isinstance(step, Run) and place not in plan.bodies and only_reads(step):
            for name in tensors_of(step):
                read.setdefault(name, place)
        elif isinstance(step, Run):
            seen |= accessed(step)
        else:
            seen |= accessed(step) | set(tensors_of(step))
    found, equal = UntrackedViews(), dict[Hashable, str]()
    for name, place in read.items():
        buffer = table.buffers.get(name)
        if buffer is None or buffer.kind != "view" or name in seen or name in plan.in_place:
            continue
        if buffer.dtype != table.buffers[buffer.storage].dtype:
            continue
        key = buffer.storage, buffer.sizes, buffer.strides, buffer.offset, parts.get(place)
        first = found.stands_for[name] = equal.setdefault(key, name)
        found.left[first] = found.left.get(first, 0) + 1
    return found


def only_reads(step: Operation) -> bool:
    """Whether a step is a call of an operator of torch's own that neither writes what it is given nor gives it back."""
    call = call_of(step)
    if call is None:
        return False
    is_torchs_own = isinstance(call.operator, str) and call.operator.startswith("aten.")
    return is_torchs_own and not call.writes and not call.aliases and call.effect is None
