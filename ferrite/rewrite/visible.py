"""What can be seen of a value from outside: how it looks, and which memory inputs and outputs share."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import size_facts
from ferrite.errors import Refusal
from ferrite.graph import (
    WRITTEN_AFTER,
    GradientFlow,
    Storage,
    Values,
    mutates,
    same_metadata,
    same_sizes,
    says_so,
    storages_in,
    storages_of,
)

aten = torch.ops.aten


def difference(old: Any, new: Any, *, layout_matters: bool = True) -> str | None:
    """How the look of two values differs; None where they are provably alike."""
    if isinstance(old, torch.Tensor) != isinstance(new, torch.Tensor):
        return "the result is no tensor"
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            return f"there would be {len(new)} results instead of {len(old)}"
        each = (difference(*pair, layout_matters=layout_matters) for pair in zip(old, new, strict=True))
        return next((problem for problem in each if problem is not None), None)
    if not isinstance(old, torch.Tensor):
        return None if same_metadata(old, new) else f"the result would be {new} instead of {old}"
    for fact in ("dtype", "device", "layout"):
        if getattr(old, fact) != getattr(new, fact):
            return f"the {fact} would be {getattr(new, fact)} instead of {getattr(old, fact)}"
    sizes: list[tuple[str, Sequence[Any], Sequence[Any]]] = [("shape", old.shape, new.shape)]
    if layout_matters and old.layout is torch.strided:
        sizes.append(("strides", old.stride(), new.stride()))
    for fact, left, right in sizes:
        if not same_sizes(left, right):
            return f"the {fact} would be {tuple(right)} instead of {tuple(left)}"
    if any(map(size_facts.equal_by_assertion, old.shape, new.shape)):
        return f"nothing else would assert that the shape is {tuple(old.shape)}"
    if old.is_conj() != new.is_conj() or old.is_neg() != new.is_neg():
        return "the conjugate or negative bit would differ"
    return None


# Operators that return their operand itself where there is nothing to do; whatever writes does so anyway.
IDLE = frozenset(
    getattr(aten, name)
    for name in ("flatten", "ravel", "contiguous", "to", "type_as", "resolve_conj", "resolve_neg", "positive", "conj")
)


def maybe_itself(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A node, and those that its value may be, not only look like: x.flatten() of a flat x is x."""
    yield node
    while mutates(node) or getattr(node.target, "overloadpacket", None) in IDLE:
        operand = node.args[0] if node.args else None
        if not isinstance(operand, torch.fx.Node):
            return
        node = operand
        yield node


def later_selves(node: torch.fx.Node) -> set[torch.fx.Node]:
    """A node, and those whose values may be its own: y.add_(1) is y."""
    found, waiting = {node}, [node]
    while waiting:
        operand = waiting.pop()
        for user in operand.users:
            if user in found or not user.args or user.args[0] is not operand:
                continue
            idle = mutates(user) or getattr(user.target, "overloadpacket", None) in IDLE
            if idle and storages_of(user) == storages_of(operand):
                found.add(user)
                waiting.append(user)
    return found


class VisibleMemory:
    """Which memory the graph's inputs and outputs live in, and which is written."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        inputs = (storages_of(node) for node in graph.nodes if node.op == "placeholder")
        self.inputs: frozenset[Storage] = frozenset().union(*inputs)
        # whatever a writing call is given counts as written: more than need be, never less
        writers = (node for node in graph.nodes if mutates(node))
        operands = (storages_of(operand) for node in writers for operand in node.all_input_nodes)
        later = (storages_of(node) for node in graph.nodes if node.meta.get(WRITTEN_AFTER))
        self.written: frozenset[Storage] = frozenset().union(*operands, *later)
        # those that hooks of the user's are registered on: `y = x.clone(); y.register_hook(...)` is no hook on `x`
        hooks = (node for node in graph.nodes if getattr(node.target, "__name__", "") == "register_hook")
        self.hooked = {node.args[0] for node in hooks}
        self.outputs = {node: storages_of(node) for node in graph.output_node().all_input_nodes}
        self.readers = collections.Counter(each for found in self.outputs.values() for each in found)

    @functools.cached_property
    def with_gradients(self) -> frozenset[Storage]:
        """The memory of inputs that are given a gradient."""
        leaves = (node for node in self.graph.nodes if node.op in ("placeholder", "get_attr") and says_so(node))
        return frozenset().union(*map(storages_of, leaves))

    @functools.cached_property
    def differentiated(self) -> frozenset[Storage]:
        """The memory of values that require a gradient, before or after they are written. Of written memory a rewrite
        changes nothing, so it holds for as long as `written` does."""
        return frozenset().union(*map(storages_of, GradientFlow(self.graph).required))

    def problem(self, pairs: Sequence[tuple[torch.fx.Node, torch.fx.Node]], values: Values) -> Refusal | None:
        """Why replacing nodes by others would change what the graph's inputs and outputs share.

        `values` are the new values of the replaced nodes and of everything behind them that changes.
        """
        returned: set[torch.fx.Node] = set()
        for before, after in pairs:
            if self.hooked and not self.hooked.isdisjoint(later_selves(before)):
                return Refusal(f"a hook sees the gradient of {before.name} alone")
            same = set(maybe_itself(after))
            mine = set() if before not in self.outputs and before in later_selves(after) else self.returned_as(before)
            if len(mine) > 1:  # `y, y.flatten()` is one tensor twice as long as the same call makes it
                return Refusal(f"outputs {' and '.join(sorted(each.name for each in mine))} may be one tensor")
            if mine:
                taken = {output for each in same for output in self.returned_as(each)} - mine
                if taken or any(each.op == "placeholder" or each in self.outputs or each in returned for each in same):
                    return Refusal(f"output {min(mine).name} would become {after.name} itself")
                returned |= same
        moved = {node: (storages_of(node), storages_in(value)) for node, value in values.items()}
        moved = {node: (old, new) for node, (old, new) in moved.items() if old != new}
        for node, (old, new) in moved.items():
            if not self.written.isdisjoint(old | new):
                return Refusal(f"the memory of {dict(pairs).get(node, node).name} is written to later")
        return self.regrouped({node: places for node, places in moved.items() if node in self.outputs})

    def returned_as(self, node: torch.fx.Node) -> set[torch.fx.Node]:
        """The outputs that may be a node's value itself."""
        return later_selves(node) & self.outputs.keys()

    def regrouped(self, moved: Mapping[torch.fx.Node, tuple[frozenset[Storage], frozenset[Storage]]]) -> Refusal | None:
        """Outputs that share memory must move together, to memory that no other input or output has."""
        leaving = collections.Counter(storage for old, _ in moved.values() for storage in old)
        destination: dict[frozenset[Storage], frozenset[Storage]] = {}
        claimed: dict[Storage, frozenset[Storage]] = {}
        for node, (old, new) in moved.items():
            stays = any(storage in self.inputs or self.readers[storage] > leaving[storage] for storage in old)
            if stays or destination.setdefault(old, new) != new:
                return Refusal(f"output {node.name} would no longer share its storage")
            if any(storage in self.inputs or storage in self.readers for storage in new):
                return Refusal(f"output {node.name} would share storage with an input or another output")
            if any(claimed.setdefault(storage, old) != old for storage in new):
                return Refusal(f"output {node.name} would share storage with another output")
        return None

    def commit(self, pairs: Sequence[tuple[torch.fx.Node, torch.fx.Node]], values: Values) -> None:
        """Note what a replacement that was made has changed."""
        replaced = dict(pairs)
        for node in [node for node in values if node in self.outputs]:
            for storage in self.outputs.pop(node):
                self.readers[storage] -= 1
                if not self.readers[storage]:
                    del self.readers[storage]
            self.outputs[replaced.get(node, node)] = storages_in(values[node])
            self.readers.update(storages_in(values[node]))
