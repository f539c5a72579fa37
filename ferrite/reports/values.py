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
from ferrite.ir.program import Compute, Operation, Program, axes_of, roots_of, writes
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
        self.reads = {row.name: row.reads for row in rows}
        self.within = computed_within(program, rows)

    def of(self, names: Iterable[str]) -> Nodes:
        """With all that is computed where they are."""
        return EMPTY.union(*(self.within.get(name, EMPTY) for name in names))

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
    numbers of values in the program as it was lowered."""

    def __init__(
        self,
        programs: Sequence[Program],
        computed: Iterable[tuple[str, Expr]],
        names: NodeNames,
    ) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.storages: dict[str, int] = {}  # what each holds
        self.nodes: dict[int, set[int]] = {}  # by the numbers of their values
        tables = list(map(BufferTable, programs))
        self.memo, *_ = [self.of_program(program, table) for program, table in zip(programs, tables, strict=True)]
        own: dict[str, set[int]] = {}
        for name, expr in computed:
            self.add(self.memo, [expr], self.leaf_in(tables[0]))
            number = self.memo[expr]
            own.setdefault(name, set()).add(number)
            is_view = any(number in own.get(each, ()) for each in names.reads.get(name, ()))  # a view of what it reads
            if isinstance(expr, COMPUTING) and name in names.places and not is_view:
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

    def memory(self, storage: str) -> int:
        return self.storages[storage] if storage in self.storages else self.number("memory", storage)

    def of_program(self, program: Program, table: BufferTable) -> Memo:
        memo: Memo = {}
        leaf = self.leaf_in(table)
        written = [[table.buffers[each.buffer].storage for each in writes(item)] for item in program.operations]
        times = Counter(storage for each in written for storage in each)
        for operation, storages in zip(program.operations, written, strict=True):
            if not axes_of(operation):
                continue  # a call: what it gives is memory like any other
            stores = operation.stores if isinstance(operation, Compute) else ()
            self.add(memo, roots_of(operation), leaf)
            known = {table.buffers[store.buffer].storage: memo[store.value] for store in stores if store.mode == "set"}
            for storage in storages:
                once = times[storage] == 1 and table.buffers[storage].kind == "owned"
                self.storages.setdefault(storage, known.get(storage, UNKNOWN) if once else UNKNOWN)
        return memo

    def leaf_in(self, table: BufferTable) -> Callable[[Expr], int]:
        def leaf(item: Expr) -> int:
            if isinstance(item, Load) and item.buffer in table.buffers:
                return self.memory(table.buffers[item.buffer].storage)
            return UNKNOWN

        return leaf

    def of_launch(self, launch: Launch) -> Memo:
        """Of what the statements of a kernel evaluate."""
        memo: Memo = {}
        known: dict[str, int] = {}  # local values and tiles
        pointers = {each.name: name for each, name in zip(launch.kernel.arguments, launch.arguments, strict=False)}

        def leaf(item: Expr) -> int:
            if isinstance(item, Local):
                return known.get(item.name, UNKNOWN)
            if isinstance(item, Load):
                return (
                    self.memory(pointers[item.buffer]) if item.buffer in pointers else known.get(item.buffer, UNKNOWN)
                )
            return UNKNOWN

        for statement in walk(launch.kernel.body):
            self.add(memo, nodes_in(statement), leaf)
            if isinstance(statement, Let):
                known[statement.name] = memo[statement.value]
            elif isinstance(statement, Store) and statement.buffer not in pointers:
                number = memo[statement.value]
                known[statement.buffer] = number if known.get(statement.buffer, number) == number else UNKNOWN
        return memo

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
