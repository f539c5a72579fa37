"""Whether a node may overwrite one of its operands.

    b = zeros(9)
    c = index_put(b, [i], v)      b may be overwritten: nobody reads it, or a view of it, afterwards
    return c

Memory may be overwritten if nobody reads or writes it afterwards, under whatever name; views of one buffer that do not
overlap are different memory. Memory of an input must in addition be overwritten by the graph itself, by one `copy_` at
its end, and nothing may read the old contents up to there. Constants, expanded tensors and what an output shares are
never overwritten.

Alias classes, reads and writes are collected once; a decision looks up positions in sorted lists and trees.
"""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Iterable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import (
    Aliases,
    Storage,
    argument,
    fake_value,
    is_wait,
    leaves,
    mutates,
    same_metadata,
    same_sizes,
    schema_of,
    tensor_storages,
)
from ferrite.passes.post_grad.byte_ranges import EVERYTHING, Accesses, Span, span_of

aten = torch.ops.aten

SIZE_QUERIES = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
)
# They count from the start of the memory that an operand lies in, or read beyond the operand.
COUNT_FROM_THE_START = frozenset(
    {
        *("aten::as_strided", "aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter"),
        *("prims::as_strided", "prims::as_strided_scatter"),
        *("aten::sym_storage_offset", "aten::set_", "aten::resize_"),
    }
)
ALIGNMENT_BYTES = 16  # a result that moves within its memory stays as well aligned as kernels ask for
ALREADY_THERE = Refusal("it is the operand already")
OperandsByStorage = dict[Storage, list[tuple[torch.fx.Node, int]]]  # by the memory they lie in, with bytes further on


class MemoryUses:
    """Who reads and writes each piece of memory of a graph, and where. Linear to build."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.aliases = Aliases(graph)
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.reads: dict[Storage, Accesses] = collections.defaultdict(Accesses)
        self.writes: dict[Storage, list[int]] = {}
        self.constants: set[Storage] = set()
        self.pinned: set[Storage] = set()  # it can be seen where in the memory a value begins
        self.copies: dict[Storage, list[torch.fx.Node]] = {}  # copy_ into an input, by the input's storage
        # From where on collectives that are given it are under way, and until when.
        self.collectives: dict[Storage, list[tuple[int, int]]] = {}
        # Where a result lives that was put into its operand's memory: in which, and how many bytes further on.
        self.home: dict[Storage, tuple[Storage, int]] = {}
        self.returned = set(self.aliases.output_storages)  # memory that outputs lie in
        # Who reads a value without metadata may read any memory.
        self.unknown = any(node.users for node in self.aliases.unknown)
        for node, index in self.position.items():
            self._enter(node, index)

    def _enter(self, node: torch.fx.Node, index: int) -> None:
        if node.op == "get_attr":
            self.constants |= self.aliases.of(node)
        if mutates(node):
            for operand in set(written_operands(node)):
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
        if is_wait(node):
            self._enter_exchange(node, index)
        sees_start = counts_from_the_start(node)
        for operand in reading:
            storages = self.aliases.of(operand)
            if sees_start:
                self.pinned |= storages
            if not self.only_looks(node, operand):
                span = EVERYTHING if sees_start else span_of(fake_value(operand))
                for storage in storages:
                    self.reads[storage].add(index, span)

    def _enter_exchange(self, wait: torch.fx.Node, index: int) -> None:
        """A collective reads what it is given until it is over."""
        begun = next(iter(wait.all_input_nodes), wait)
        if begun.target is operator.getitem:
            begun = begun.all_input_nodes[0]
        for operand in begun.all_input_nodes:
            for storage in self.aliases.of(operand):
                self.collectives.setdefault(storage, []).append((self.position[begun], index))

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
        return self.home.get(storage, (storage, 0))[0]

    def in_input(self, operand: torch.fx.Node) -> bool:
        return self.root(storage_of(fake_value(operand))) in self.aliases.input_storages

    def settle(self, result: Any, operand: torch.fx.Node) -> None:
        """From now on a result lives in its operand's memory."""
        if isinstance(result, torch.Tensor):
            target = fake_value(operand)
            root, by = self.home.get(storage_of(target), (storage_of(target), 0))
            self.home[storage_of(result)] = (root, by + (shift(target, result) or 0))
            if storage_of(result) in self.aliases.output_storages:
                self.returned.add(root)

    def by_place(self, operands: Iterable[Any]) -> OperandsByStorage:
        """Operands by the memory that they lie in."""
        found: OperandsByStorage = {}
        for each in operands:
            if isinstance(each, torch.fx.Node):
                for storage in self.aliases.of(each):
                    root, by = self.home.get(storage, (storage, 0))
                    found.setdefault(root, []).append((each, by))
        return found

    def refusal(
        self, node: torch.fx.Node, operand: Any, result: Any, others: OperandsByStorage, *, whole: bool = False
    ) -> Refusal | None:
        """Why a node may not write its result into an operand; None if it may. `others`: what it reads besides;
        `whole`: whether it may reach all memory that the operand lies in."""
        target = fake_value(operand) if isinstance(operand, torch.fx.Node) else None
        if self.unknown or not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
            return Refusal("nothing is known of the memory")
        problem = self._result_problem(target, result, whole) if isinstance(result, torch.Tensor) else None
        if problem is not None:
            return problem
        if not each_element_once(target):
            return Refusal("elements of the operand share memory")
        span = EVERYTHING if whole else span_of(target)
        root, by = self.home.get(storage_of(target), (storage_of(target), 0))
        for other, further in others.get(root, ()):
            theirs = EVERYTHING if whole else span_of(fake_value(other))
            # eager's check for operands that share memory does not look whether there is an element to share
            if torch_api.known_equal(target.numel(), 0) or span.shifted(by).overlaps(theirs.shifted(further)):
                return Refusal(f"{other.name} shares the memory")
        return self._overwriting_refusal(self.position[node], target, span, result)

    def _result_problem(self, target: torch.Tensor, result: torch.Tensor, whole: bool) -> Refusal | None:
        own = storage_of(result)
        if own == storage_of(target):
            return ALREADY_THERE
        if same_metadata(target, result):
            moved = False
        elif whole or not same_but_place(target, result):
            return Refusal("the result looks different")
        else:
            moved = True
        if moved and (own in self.pinned or (shift(target, result) or 1) % ALIGNMENT_BYTES):
            return Refusal("it can be seen where the result begins in its memory")
        if own in self.aliases.output_storages and not fills_its_memory(target):
            return Refusal("the result is returned, and would keep more memory alive than its own")
        return None

    def _overwriting_refusal(self, here: int, target: torch.Tensor, span: Span, result: Any) -> Refusal | None:
        storage = storage_of(target)
        root = self.root(storage)
        if root in self.constants:
            return Refusal("it is a constant")
        if any(begun < here < over for each in (storage, root) for begun, over in self.collectives.get(each, ())):
            return Refusal("it is being sent")
        own = storage_of(result) if isinstance(result, torch.Tensor) else None
        if own in self.aliases.output_storages and root in self.returned:  # also where nothing is read: no elements
            return Refusal("both are returned, and would share memory")
        if root not in self.aliases.input_storages:
            later = self.reads[storage].after(here, span) if storage in self.reads else False
            later = later or any_within(self.writes.get(storage), here)
            return Refusal("it is read or written later") if later else None
        # An input: the graph must overwrite it anyway, and nobody may miss the old contents until then.
        if own is not None and not same_metadata(target, result):
            return Refusal("the result lies elsewhere in its memory")
        copies = [copy for copy in self.copies.get(root, ()) if self.position[copy] > here]
        if len(copies) != 1 or any_within(self.writes.get(root), here, but=self.position[copies[0]]):
            return Refusal("it belongs to the caller")
        copy = copies[0]
        end = self.position[copy]
        if any(any_within(self.reads[each].positions, here, end) for each in (storage, root) if each in self.reads):
            return Refusal("it is read before the graph overwrites it")
        input_value, source = (fake_value(each) for each in copy.args[:2])  # type: ignore[arg-type]
        from_result = own is not None and isinstance(source, torch.Tensor) and storage_of(source) == own
        copied_back = from_result and same_metadata(input_value, source)
        if from_result and not copied_back:
            return Refusal("the graph overwrites it with another view of the result")
        if not (copied_back or same_metadata(input_value, target)):
            return Refusal("the graph does not overwrite all of it")
        if own is not None and own in self.aliases.output_storages:
            return Refusal("the result is returned, and would share the memory of an input")
        if own is not None and not copied_back and own in self.reads and any_within(self.reads[own].positions, end):
            return Refusal("the result is read after the input is overwritten")
        return None


def any_within(positions: list[int] | None, after: int, until: int | None = None, but: int = -1) -> bool:
    """Whether one of some sorted positions lies behind `after`, and not behind `until`."""
    for index in (positions or ())[bisect.bisect_right(positions or (), after) :]:
        if until is not None and index > until:
            return False
        if index != but:
            return True
    return False


def counts_from_the_start(node: torch.fx.Node) -> bool:
    """Whether a node can see where its operands begin in their memory, or reach beyond them. Of operators that are not
    torch's own nobody knows."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return False
    schema = schema_of(node.target)
    if schema is None or schema.name in COUNT_FROM_THE_START:
        return True
    return not schema.name.startswith(("aten::", "prims::"))


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


def same_but_place(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two strided tensors look the same but for where they begin in their memory."""
    if (first.dtype, first.device, first.layout) != (second.dtype, second.device, second.layout):
        return False
    if first.is_conj() != second.is_conj() or first.is_neg() != second.is_neg():
        return False
    return same_sizes(first.shape, second.shape) and same_sizes(first.stride(), second.stride())


def shift(target: torch.Tensor, result: torch.Tensor) -> int | None:
    """How many bytes further on in its memory one tensor begins than another in its own; None where nobody knows."""
    by = target.storage_offset() - result.storage_offset()
    return by * target.element_size() if isinstance(by, int) else None


def fills_its_memory(value: torch.Tensor) -> bool:
    return torch_api.known_equal(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def storage_of(value: torch.Tensor) -> Storage:
    return tensor_storages(value)[0]
