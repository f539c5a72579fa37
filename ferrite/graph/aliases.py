"""Which nodes of a graph share memory, read off the storages of their fake values.

Fake tensors have storages without contents: a view's fake value is a view of its base's, so two nodes may share memory
at run time exactly if their fake values share a storage. Two questions are answered here: whether two nodes do, and how
the inputs and outputs of a graph do, which no rewrite may change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ferrite.graph.facts import fake_value, leaves, produces_value

# ("in", 2) is the third input, ("out", 0) the first leaf of what the graph returns.
Place = tuple[str, int]


@dataclass(frozen=True)
class Storage:
    """The identity of a storage. Holds a weak reference, so that its address is not used again meanwhile."""

    address: int
    keeps_alive: object = field(compare=False, repr=False)


def storages_in(value: Any) -> frozenset[Storage]:
    """The storages of every tensor in a value."""
    if isinstance(value, torch.Tensor):  # most values are one
        return frozenset(tensor_storages(value))
    tensors = (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))
    return frozenset(storage for tensor in tensors for storage in tensor_storages(tensor))


def tensor_storages(tensor: torch.Tensor) -> tuple[Storage, ...]:
    """The storages one tensor is made of: one if it is strided, one for each component if it is sparse or ragged."""
    if tensor.layout is torch.strided:
        return (_identity(tensor),)
    if tensor.layout is torch.jagged and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return tuple(storage for name in names for storage in tensor_storages(getattr(tensor, name)))
    found = []
    for component in ("_indices", "_values", "crow_indices", "ccol_indices", "col_indices", "row_indices", "values"):
        try:
            found.append(_identity(getattr(tensor, component)()))
        except (RuntimeError, NotImplementedError, AttributeError):
            continue  # this layout has no such component
    # A layout that shows nothing of its inside is told apart by the tensor itself.
    return tuple(found) or (Storage(id(tensor), tensor),)


def _identity(tensor: torch.Tensor) -> Storage:
    reference = StorageWeakRef(tensor.untyped_storage())
    return Storage(reference.cdata, reference)


def storages_of(node: torch.fx.Node) -> frozenset[Storage]:
    """The storages that a node's value lives in: empty for numbers, several for a tuple."""
    return storages_in(fake_value(node))


def input_storages(graph: torch.fx.Graph) -> frozenset[Storage]:
    """The storages that the inputs of a graph live in."""
    return frozenset[Storage]().union(*map(storages_of, graph.find_nodes(op="placeholder")))


def storage_of(node: torch.fx.Node) -> Hashable | None:
    """A hashable identity of the memory of a node: a storage, a set of them where it has several, None if none."""
    found = storages_of(node)
    return (next(iter(found)) if len(found) == 1 else found) if found else None


def apart_in_memory(graph: torch.fx.Graph, places: frozenset[int]) -> frozenset[int]:
    """Those of some inputs that share memory with no other input: two of them may be views of one."""
    if not places:
        return places
    inputs = [storages_of(node) for node in graph.find_nodes(op="placeholder")]
    seen = Counter(storage for each in inputs for storage in each)
    return frozenset(place for place in places if all(seen[storage] == 1 for storage in inputs[place]))


class Aliases:
    """The alias classes of a graph as it is now; later edits are not seen. Linear to build."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.storages: dict[torch.fx.Node, frozenset[Storage]] = {}
        self.unknown: set[torch.fx.Node] = set()
        for node in graph.nodes:
            self.storages[node] = storages_of(node)
            if produces_value(node) and "val" not in node.meta and "example_value" not in node.meta:
                self.unknown.add(node)
        inputs = (self.storages[node] for node in graph.nodes if node.op == "placeholder")
        self.input_storages: frozenset[Storage] = frozenset().union(*inputs)
        results = [node for node in returned(graph) if isinstance(node, torch.fx.Node)]
        self.output_storages: frozenset[Storage] = frozenset().union(*(self.storages[node] for node in results))

    def of(self, node: torch.fx.Node) -> frozenset[Storage]:
        """The storages of a node, also of one made after this was built."""
        return self.storages[node] if node in self.storages else storages_of(node)

    def share(self, first: torch.fx.Node, second: torch.fx.Node) -> bool:
        """Whether two nodes may share memory. Where a value is not known, they may."""
        if first in self.unknown or second in self.unknown:
            return True
        return not self.of(first).isdisjoint(self.of(second))


@dataclass(frozen=True)
class Sharing:
    """How the inputs and outputs of a graph share memory, and which of them are one and the same value.

    Each group holds the places, two at least, that share one storage or are one tensor. Groups, not pairs: a thousand
    slices of one input are one group, but half a million pairs.
    """

    storage: frozenset[frozenset[Place]]
    identity: frozenset[frozenset[Place]]


def sharing_matrix(graph: torch.fx.Graph) -> Sharing:
    """The sharing among the inputs and the flattened outputs of a graph. Linear."""
    by_storage: dict[Storage, set[Place]] = {}
    by_node: dict[torch.fx.Node, set[Place]] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places: list[tuple[Place, Any]] = [(("in", position), node) for position, node in enumerate(inputs)]
    places += [(("out", position), value) for position, value in enumerate(returned(graph))]
    for place, node in places:
        if not isinstance(node, torch.fx.Node):
            continue
        found = storages_of(node)
        for storage in found:
            by_storage.setdefault(storage, set()).add(place)
        if found:  # numbers have no identity that a caller could see
            by_node.setdefault(node, set()).add(place)
    return Sharing(_groups(by_storage), _groups(by_node))


def returned(graph: torch.fx.Graph) -> list[Any]:
    """The flattened outputs of a graph: nodes and constants."""
    for node in reversed(graph.nodes):
        if node.op == "output":
            return list(leaves(node.args[0]))
    return []


def _groups(classes: dict[Any, set[Place]]) -> frozenset[frozenset[Place]]:
    return frozenset(frozenset(places) for places in classes.values() if len(places) > 1)
