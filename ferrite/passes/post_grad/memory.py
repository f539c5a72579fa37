"""Whether a node may overwrite one of its operands.

    b = zeros(9)
    c = index_put(b, [i], v)      b may be overwritten: nobody reads it, or a view of it, afterwards
    return c

Memory may be overwritten if nobody reads or writes it afterwards, under whatever name. Memory of an input must in
addition be overwritten by the graph itself, by one `copy_` at its end, and nothing may read the old contents up to
there. Constants, expanded tensors and what an output shares are never overwritten.

Alias classes, reads and writes are collected once; a decision looks up positions in sorted lists.
"""

from __future__ import annotations

import bisect
import operator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.graph.aliases import Aliases, Storage, tensor_storages
from ferrite.graph.facts import argument, leaves, schema_of
from ferrite.graph.regions import mutates
from ferrite.graph.values import same_metadata

aten = torch.ops.aten

SIZE_QUERIES = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
)


class Memory:
    """Who reads and writes each piece of memory of a graph, and where. Linear to build."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.aliases = Aliases(graph)
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.reads: dict[Storage, list[int]] = {}
        self.writes: dict[Storage, list[int]] = {}
        self.constants: set[Storage] = set()
        self.copies: dict[Storage, list[torch.fx.Node]] = {}  # copy_ into an input, by the input's storage
        self.home: dict[Storage, Storage] = {}  # where a result lives that was put into its operand's memory
        # Who reads a value without metadata may read any memory.
        self.unknown = any(node.users for node in self.aliases.unknown)
        for node, index in self.position.items():
            self._enter(node, index)

    def _enter(self, node: torch.fx.Node, index: int) -> None:
        if node.op == "get_attr":
            self.constants |= self.aliases.of(node)
        written: set[torch.fx.Node] = set()
        if mutates(node):
            written = set(written_operands(node))
            for operand in written:
                for storage in self.aliases.of(operand):
                    self.writes.setdefault(storage, []).append(index)
        if node.target is aten.copy_.default:
            target, source = node.args[0], node.args[1]
            if isinstance(target, torch.fx.Node) and target.op == "placeholder":
                for storage in self.aliases.of(target):
                    self.copies.setdefault(storage, []).append(node)
            # What is overwritten as a whole is not read, unless it is what it is overwritten with.
            reading = [source] if isinstance(source, torch.fx.Node) else []
        else:
            reading = list(node.all_input_nodes)
        for operand in reading:
            if self.only_looks(node, operand):
                continue
            for storage in self.aliases.of(operand):
                self.reads.setdefault(storage, []).append(index)

    def only_looks(self, node: torch.fx.Node, operand: torch.fx.Node) -> bool:
        """Whether a node needs an operand's sizes alone, or is another name for its memory, read by others."""
        if node.target in SIZE_QUERIES:
            return True
        if (
            node.op == "output"
            or mutates(node)
            or (schema_of(node.target) is None and node.target is not operator.getitem)
        ):
            return False
        mine = self.aliases.of(node)
        return bool(mine) and mine <= self.aliases.of(operand)

    def root(self, storage: Storage) -> Storage:
        while storage in self.home:
            storage = self.home[storage]
        return storage

    def settle(self, result: torch.Tensor | None, place: Storage) -> None:
        """From now on a result lives in its operand's memory."""
        if result is not None:
            self.home[storage_of(result)] = place

    def refusal(self, node: torch.fx.Node, operand: Any, result: Any, others: list[Any]) -> str | None:
        """Why a node may not write its result into an operand; None if it may. `others`: what it reads besides."""
        target = fake_value(operand) if isinstance(operand, torch.fx.Node) else None
        if self.unknown or not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
            return "nothing is known of the memory"
        if isinstance(result, torch.Tensor):
            if not same_metadata(target, result):
                return "the result looks different"
            if storage_of(result) == storage_of(target):
                return "it is the operand already"
        if not each_element_once(target):
            return "elements of the operand share memory"
        storage = storage_of(target)
        for other in others:
            shared = self.aliases.of(other) if isinstance(other, torch.fx.Node) else ()
            if any(self.root(each) == self.root(storage) for each in shared):
                return f"{other.name} shares the memory"
        return self._overwriting_refusal(self.position[node], target, storage, result)

    def _overwriting_refusal(self, here: int, target: torch.Tensor, storage: Storage, result: Any) -> str | None:
        root = self.root(storage)
        if root in self.constants:
            return "it is a constant"
        own = storage_of(result) if isinstance(result, torch.Tensor) else None
        if root not in self.aliases.input_storages:
            later = any_within(self.reads.get(storage), here) or any_within(self.writes.get(storage), here)
            return "it is read or written later" if later else None
        # An input: the graph must overwrite it anyway, and nobody may miss the old contents until then.
        copies = [copy for copy in self.copies.get(root, ()) if self.position[copy] > here]
        if len(copies) != 1 or any_within(self.writes.get(root), here, but=self.position[copies[0]]):
            return "it belongs to the caller"
        copy = copies[0]
        end = self.position[copy]
        if any_within(self.reads.get(storage), here, end) or any_within(self.reads.get(root), here, end):
            return "it is read before the graph overwrites it"
        input_value, source = (fake_value(each) for each in copy.args[:2])  # type: ignore[arg-type]
        from_result = own is not None and isinstance(source, torch.Tensor) and storage_of(source) == own
        copied_back = from_result and same_metadata(input_value, source)
        if from_result and not copied_back:
            return "the graph overwrites it with another view of the result"
        if not (copied_back or same_metadata(input_value, target)):
            return "the graph does not overwrite all of it"
        if own is not None and own in self.aliases.output_storages:
            return "the result is returned, and would share the memory of an input"
        if own is not None and not copied_back and any_within(self.reads.get(own), end):
            return "the result is read after the input is overwritten"
        return None


def any_within(positions: list[int] | None, after: int, until: int | None = None, but: int = -1) -> bool:
    """Whether one of some sorted positions lies behind `after`, and not behind `until`."""
    for index in (positions or ())[bisect.bisect_right(positions or (), after) :]:
        if until is not None and index > until:
            return False
        if index != but:
            return True
    return False


def written_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a mutating node writes into; all that it is given where the schema does not tell."""
    schema = schema_of(node.target)
    if schema is None:
        return list(node.all_input_nodes)
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = (leaf for name in names for leaf in leaves(argument(node, name)))
    return [leaf for leaf in given if isinstance(leaf, torch.fx.Node)]


def each_element_once(value: torch.Tensor) -> bool:
    """Whether no two elements of a tensor provably share memory: each stride steps over all that lies below it."""
    dims = [(stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if not is_one(size)]
    dims.sort(key=lambda dim: torch_api.size_hint(dim[0]))
    reach: Any = 1
    for stride, size in dims:
        if not torch_api.known_true(stride >= reach):
            return False
        reach = stride * size
    return True


def is_one(size: int | torch.SymInt) -> bool:
    return torch_api.known_equal(size, 1)


def storage_of(value: torch.Tensor) -> Storage:
    return tensor_storages(value)[0]
