"""Which node of the graph a value is computed for, where one operation computes those of several.

With `b = a * w` and `c = gelu(b)` one operation computes `mul(b, special_ndtr(b))`: the product is of the node `mul`,
what is made of it of `gelu`. Programs and kernels do not say so. Lowering does, for the expressions that it began with
(`computed`), and a kernel has these again over other axes, with parts of them in local values and tiles. So values are
numbered: those that are computed alike from the same memory have one number, wherever their elements lie. What has no
number of a node is computed for what uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ferrite.debug import GraphRow
from ferrite.ir import Cast, Const, Expr, IndexValue, Load, Local, Masked, Op, Param, Random, nodes_of
from ferrite.ir.kernel import Let, Store, nodes_in, walk
from ferrite.ir.program import Compute, Operation, Program, axes_of, reads, roots_of, writes
from ferrite.schedule import Launch
from ferrite.schedule.fusion import BufferTable

Nodes = frozenset[int]
Memo = dict[Expr, int]
EMPTY: Nodes = frozenset()
UNKNOWN = 0  # the number of what no expression says: the result of a reduction, memory that is written twice
COMPUTING = Op | Cast | Masked | Random | Local


class NodeNames:
    """The nodes of a graph, in order, by their names."""

    def __init__(self, program: Program, rows: Sequence[GraphRow]) -> None:
        self.places = {row.name: place for place, row in enumerate(rows)}
        self.rows = rows
        self.within = computed_within(program, rows)

    def of(self, names: Iterable[str]) -> Nodes:
        """With all that is computed where they are."""
        return EMPTY.union(*(self.within.get(name, EMPTY) for name in names))

    def and_read(self, nodes: Nodes) -> Nodes:
        """With what they read: a part of that may be computed with them, though operations stand for the rest."""
        read = (self.places.get(name) for node in nodes for name in self.rows[node].reads)
        return nodes.union(place for place in read if place is not None)

    def own(self, operation: Operation, with_values: Nodes) -> Nodes:
        """Of an operation, without those computed within it that have values of their own there."""
        names = operation.origin.nodes
        return (self.of(names) - with_values) | {self.places[name] for name in names if name in self.places}


def computed_within(program: Program, rows: Sequence[GraphRow]) -> dict[str, Nodes]:
    """For each node what is computed where it is: itself, and what it reads that no operation stands for. Such a node
    is computed wherever it is used."""
    numbers = {row.name: number for number, row in enumerate(rows)}
    alone = {node for operation in program.operations for node in operation.origin.nodes}
    alone |= {row.name for row in rows if row.is_input}
    found: dict[str, Nodes] = {}
    for row in rows:
        if row.name in found:
            continue
        more = (found[each] for each in row.reads if each in found and each not in alone)
        found[row.name] = frozenset((numbers[row.name],)).union(*more)
    return found


class ComputedValues:
    """Of one graph. `programs`: as lowered, and as scheduled; `computed`: what nodes were lowered to. `memo`: the
    numbers of values in these programs."""

    def __init__(self, programs: Sequence[Program], computed: Iterable[tuple[str, Expr]], names: NodeNames) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.storages: dict[str, int] = {}  # what each holds
        self.nodes: dict[int, set[int]] = {}  # by the numbers of their values
        self.memo: Memo = {}
        self.tables = list(map(BufferTable, programs))
        for program, table in zip(programs, self.tables, strict=True):
            self.add_program(program, table)
        own: dict[str, set[int]] = {}
        for name, expr in computed:
            if name not in names.places:
                continue
            self.add(self.memo, [expr], self.leaf)
            number = self.memo[expr]
            own.setdefault(name, set()).add(number)
            is_view = any(
                number in own.get(each, ()) for each in names.rows[names.places[name]].reads
            )  # of what it reads
            if isinstance(expr, COMPUTING) and not is_view:
                self.nodes.setdefault(number, set()).add(names.places[name])

    # --- numbers ------------------------------------------------------------------------------------------------------

    def number(self, *parts: Any) -> int:
        return self.numbers.setdefault(parts, len(self.numbers) + 1)

    def add(self, memo: Memo, roots: Sequence[Expr], leaf: Callable[[Expr], int]) -> None:
        """Number these and all they need."""
        for item in nodes_of(*roots, leaving_out=memo):
            inside = [memo[each] for each in item.args]
            match item:
                case Load() | Local() | Param():
                    memo[item] = leaf(item)
                case Const(bits=bits):
                    memo[item] = self.number(Const, item.dtype, bits)
                case IndexValue():
                    memo[item] = self.number(IndexValue, item.dtype)
                case Op(name=name):
                    memo[item] = self.number(Op, name, item.dtype, *inside)
                case Random(kind=kind):
                    memo[item] = self.number(Random, kind, item.dtype, *inside)
                case _:
                    memo[item] = self.number(type(item), item.dtype, *inside)

    def buffer(self, name: str) -> int:
        """What a buffer holds. Names mean the same in all programs; where a buffer lies, the scheduler may change."""
        storage = next((table.buffers[name].storage for table in self.tables if name in table.buffers), name)
        return self.storages[storage] if storage in self.storages else self.number("memory", storage)

    def leaf(self, item: Expr) -> int:
        """Of what expressions in a program begin with."""
        return self.buffer(item.buffer) if isinstance(item, Load) else UNKNOWN

    def add_program(self, program: Program, table: BufferTable) -> None:
        written = [[table.buffers[each.buffer].storage for each in writes(item)] for item in program.operations]
        times = Counter(storage for each in written for storage in each)
        for operation, storages in zip(program.operations, written, strict=True):
            if not axes_of(operation):
                continue  # a call: what it gives is memory like any other
            self.add(self.memo, roots_of(operation), self.leaf)
            stores = operation.stores if isinstance(operation, Compute) else ()
            sets = [store for store in stores if store.mode == "set"]
            known = {table.buffers[store.buffer].storage: self.memo[store.value] for store in sets}
            for storage in storages:
                if table is not self.tables[0] and storage in self.tables[0].buffers:
                    continue  # known, and now perhaps where another buffer lies as well
                once = times[storage] == 1 and table.buffers[storage].kind == "owned"
                self.storages.setdefault(storage, known.get(storage, UNKNOWN) if once else UNKNOWN)

    def of_launch(self, launch: Launch) -> Memo:
        """Of what the statements of a kernel evaluate."""
        memo: Memo = {}
        known: dict[str, int] = {}  # local values, tiles, and what was stored through pointers
        held = self.held_by_pointers(launch)

        def leaf(item: Expr) -> int:
            if isinstance(item, Local):
                return known.get(item.name, UNKNOWN)
            if isinstance(item, Load):
                return known.get(item.buffer, held.get(item.buffer, UNKNOWN))
            return UNKNOWN

        for statement in walk(launch.kernel.body):
            self.add(memo, nodes_in(statement), leaf)
            if isinstance(statement, Let):
                known[statement.name] = memo[statement.value]
            elif isinstance(statement, Store) and statement.mode == "set":
                number, before = memo[statement.value], known.get(statement.buffer)
                known[statement.buffer] = number if before is None or before == number else UNKNOWN
        return memo

    def held_by_pointers(self, launch: Launch) -> dict[str, int]:
        """What is behind each pointer at the beginning, where a buffer may lie that will be written where another one
        lies."""
        table = self.tables[-1]
        written = {access.buffer for operation in launch.operations for access in writes(operation)}
        held: dict[str, set[int]] = {}
        for name in {access.buffer for operation in launch.operations for access in reads(operation)} - written:
            held.setdefault(table.buffers[name].storage, set()).add(self.buffer(name))
        found: dict[str, int] = {}
        for pointer, storage in zip(launch.kernel.arguments, launch.arguments, strict=False):
            numbers = held.get(storage) or {self.buffer(storage)}
            found[pointer.name] = min(numbers) if len(numbers) == 1 else UNKNOWN
        return found

    # --- nodes --------------------------------------------------------------------------------------------------------

    def computed_by(self, items: Iterable[Expr], memo: Memo, among: Nodes) -> Nodes:
        """The nodes that have one of these values."""
        return (
            EMPTY.union(*(self.nodes.get(memo[item], EMPTY) for item in items if isinstance(item, COMPUTING))) & among
        )

    def by_value(self, items: Sequence[Expr], memo: Memo, among: Nodes, others: Nodes) -> dict[Expr, Nodes]:
        """The nodes that each of some values is computed for, operands first: its own, or those of what uses it, or
        `others`."""
        found: dict[Expr, Nodes] = {}
        users: dict[Expr, Nodes] = {}
        for item in reversed(items):
            found[item] = self.computed_by((item,), memo, among) or users.get(item, EMPTY) or others
            for operand in item.under:
                users[operand] = users.get(operand, EMPTY) | found[item]
        return found
