"""Groups that are alike become one kernel, built once: the layers of a model repeat.

Two groups are alike when they differ in nothing but names: of axes, of buffers, of the nodes they come from. A
signature says all that a kernel is built from, with numbers in the place of names, and takes one walk over the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ferrite.ir import Axis, Expr, Index, Interned, Load, Number, Product, Sum, Symbol, nodes_of
from ferrite.ir.kernel import Kernel, canonical, verify_kernel
from ferrite.ir.program import Attention, Compute, Destination, Reduce, Scan, Store, roots_of
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.steps import device_type
from ferrite.schedule.target import Schedulings

# What says everything by itself, without a name of one group in it.
NAMELESS = (Number, Symbol)


@dataclass
class RepeatedKernel:
    """The kernel of the first group of its kind; `arguments`: numbers of the storages behind its pointers."""

    kernel: Kernel
    names: tuple[str, ...]  # the storages of that group, by number
    arguments: tuple[int, ...]
    forms: dict[Hashable, Kernel] = field(default_factory=dict)  # by which pointers are one

    def form(self, taken_over: Mapping[int, int]) -> Kernel:
        """The kernel by position, where some storages take over the memory of others. Its laws are checked here, for
        every kernel that may run: threads that store to one place are no crash, but another number now and then."""
        key = tuple(sorted(taken_over.items()))
        if key not in self.forms:
            made = canonical(self.kernel, {self.names[old]: self.names[new] for old, new in taken_over.items()})
            self.forms[key] = verify_kernel(made)
        return self.forms[key]


@dataclass(frozen=True)
class Repeat:
    """One group as a case of its pattern."""

    pattern: RepeatedKernel
    names: tuple[str, ...]
    group: Group

    @property
    def is_first(self) -> bool:
        """Whether the kernel was built for this very group."""
        return self.names is self.pattern.names

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.names[number] for number in self.pattern.arguments)

    @property
    def sizes(self) -> tuple[Symbol, ...]:
        return self.pattern.kernel.sizes

    def kernel(self, taken_over: Mapping[str, str]) -> Kernel:
        """`taken_over`: storages that take over memory, as for `canonical`."""
        numbers = {name: number for number, name in enumerate(self.names)}
        kernel = self.pattern.form({numbers[old]: numbers[new] for old, new in taken_over.items()})
        return replace(kernel, origins=self.group.origins)


class Repeats:
    def __init__(self, buffer_table: BufferTable, schedulings: Schedulings) -> None:
        self.buffer_table, self.schedulings = buffer_table, schedulings
        self.patterns: dict[Hashable, RepeatedKernel] = {}

    def of(self, group: Group, inside: tuple[str, ...]) -> Repeat:
        """`inside`: storages that nothing else accesses."""
        signature = Signature(self.buffer_table, inside)
        key = signature.of_group(group)
        names = tuple(signature.storages)
        pattern = self.patterns.get(key)
        if pattern is None:
            built = self.schedulings[device_type(group.device)].arranged(group, inside, self.buffer_table)
            arguments = tuple(signature.storages[name] for name in built.arguments)
            pattern = self.patterns[key] = RepeatedKernel(built.kernel, names, arguments)
        return Repeat(pattern, names, group)


class Signature:
    """Expressions are listed once, operands first, and called by their place in the list; indices are small and are
    spelt out, their terms in no order: terms are sorted by name."""

    def __init__(self, buffer_table: BufferTable, inside: tuple[str, ...]) -> None:
        self.buffer_table, self.inside = buffer_table, frozenset(inside)
        self.axes: dict[Axis, int] = {}
        self.storages: dict[str, int] = {}
        self.buffers: dict[str, int] = {}
        self.places: dict[Expr, int] = {}
        self.rows: list[Hashable] = []

    def of_group(self, group: Group) -> Hashable:
        rows = tuple(map(self.index, group.rows))
        members = [(tuple(map(self.index, member.axes)), self.operation(member.operation)) for member in group.members]
        return (group.device, rows, *members, *self.rows)

    def operation(self, operation: Compute | Reduce | Scan | Any) -> Hashable:
        for item in nodes_of(*roots_of(operation), leaving_out=self.places):
            self.rows.append(self.node(item))
            self.places[item] = len(self.places)
        match operation:
            case Compute(stores=stores):
                return Compute, tuple(map(self.store, stores))
            case Reduce():
                reduced = tuple(map(self.index, operation.reduced))
                return Reduce, reduced, operation.kind, self.results(operation)
            case Scan():
                return Scan, self.index(operation.along), operation.combine, self.results(operation)
            case Attention():
                about = operation.block_sides, [each.whole for each in operation.key_blocks]
                rows = [each.whole for each in operation.row_blocks], operation.gradients is None
                return Attention, repr((about, rows)), self.results(operation)
        raise TypeError(f"{type(operation).__name__} is no loop that is scheduled")

    def results(self, operation: Reduce | Scan | Attention) -> Hashable:
        values = tuple(self.places[value] for value in operation.values)
        return values, tuple(
            None if destination is None else self.destination(destination) for destination in operation.destinations
        )

    def store(self, store: Store) -> Hashable:
        return self.destination(Destination(store.buffer, store.coordinates)), self.places[store.value], store.mode

    def destination(self, destination: Destination) -> Hashable:
        return self.buffer(destination.buffer), tuple(map(self.index, destination.coordinates))

    def node(self, node: Interned) -> Hashable:
        if isinstance(node, Load):
            return Load, self.buffer(node.buffer), tuple(map(self.index, node.coordinates))
        return (type(node), *(self.part(getattr(node, name)) for name in node.fields))

    def part(self, value: Any) -> Hashable:
        if isinstance(value, tuple):
            return tuple(map(self.part, value))
        if isinstance(value, Index):
            return self.index(value)
        return self.places[value] if isinstance(value, Expr) else cast(Hashable, value)

    def index(self, index: Index) -> Hashable:
        if isinstance(index, NAMELESS):
            return index
        if isinstance(index, Axis):
            if index not in self.axes:
                self.axes[index] = len(self.axes)
                self.rows.append(("axis", self.index(index.extent)))
            return ("axis", self.axes[index])
        if isinstance(index, Sum):
            return Sum, index.constant, frozenset((self.index(item), factor) for item, factor in index.terms)
        if isinstance(index, Product):
            return Product, frozenset(Counter(map(self.index, index.factors)).items())
        return self.node(index)

    def buffer(self, name: str) -> int:
        """A number, after a row that says how the buffer lies in which storage."""
        found = self.buffers.get(name)
        if found is None:
            buffer = self.buffer_table.buffers[name]
            storage = self.buffer_table.buffers[buffer.storage]
            number = self.storages.setdefault(buffer.storage, len(self.storages))
            found = self.buffers[name] = len(self.buffers)
            for each in (buffer, storage):
                sizes = tuple(map(self.index, (*each.sizes, *each.strides, each.offset)))
                self.rows.append((each.dtype, each.kind, str(each.device), len(each.sizes), *sizes))
            self.rows.append((number, buffer.storage in self.inside))
        return found
