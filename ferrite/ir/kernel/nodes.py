"""The kernel: how a piece of a program is computed. A tree of loops that code generators print, and change no more.

    kernel    = Kernel(pointers, sizes, body, warps, problems, resident)
    pointer   = Pointer(name, dtype, access)                     memory of the caller; access: read, write, both
    statement = Loop(axis, kind, body, lanes, copies)            for every value of an axis; kinds below
              | Scratch(name, dtype, sizes)                      memory of its own for every iteration around it
              | Let(name, value)                                 computed once, here
              | Accumulate(states, body)                         states that the body updates with values
              | Update(state, values)                            values become part of a state
              | Store(buffer, coordinates, value, mode, atomic)  mode: set, or how to combine with what is there
              | When(condition, body)                            only where it holds
              | Prefetch(buffer, coordinates)                    what lies there is read soon
              | Attend(operation, lanes, copies)                 attention of one row, or gradients of one key
    state     = State(kind, names, dtypes, combine)              kind: a row of `ferrite.ir.states`, or "own"
    expr      = those of `ferrite.ir.expr`, with Local(name) for what Let and Accumulate name

    kinds     serial      one after the other, in order
              parallel    independent; spread over threads or program instances, at least `copies` in one
              vector      independent; `lanes` at a time, `copies` of these unrolled
              unrolled    in order, each written out; the extent is a number
              reduction   independent but for the states they update; lanes and copies as for vector
              scan        as reduction, but in order, and states can be read when updated: what they are up to here
              sort        as reduction, but a least integer, which is the state, can be read after all updates: the
                          one that comes at this place when all are in order

Meaning
- Statements run in order. A loop is over, for every iteration, when the next statement begins.
- An expression is evaluated when its statement runs: a load reads what is in memory then. What is to be computed once
  and used by several statements is a Let.
- A pointer is flat: its one coordinate counts elements from the address that is passed. Strides and offsets are inside
  the coordinates, so that one rule tells what vector code wants to know: the factor of the vector axis in it. A tile of
  scratch has its own dimensions, rows last to first in memory. Pointers come first, by position, then the sizes, as
  64-bit integers. Different pointers do not overlap where one of them is written; in place is one pointer for both.
- An extent may depend on sizes and on the axes around: a ragged tile is `min(32, s0 - 32*i0)`. It need not be a
  multiple of the lanes: what remains is masked, or done one by one, as the back end likes. The extent of a serial loop
  may also be data: rows of different lengths. It is read when the loop begins.
- A state begins as nothing. Inside reduction, vector, unrolled and parallel loops every lane, copy and thread may have
  a state of its own; they are combined when the block ends, in any order. That is how a sum gets several accumulators.
  Where only serial loops, scans and sorts stand between, the names of the state can be read inside the block: what it
  is so far. After the block they are local values. In a scan, the loop itself updates a state.
- A pair or triple is one state: argmax (value, place: the smallest place among equals, NaN before numbers), welford
  (mean, squared deviations, count), softmax (greatest, sum of exponentials relative to it). It is updated with what
  its kind takes, or with a whole state of the kind: so are partial results combined.
- Data in an index is a gather or scatter. It is checked: outside 0 <= value < extent the kernel stops and reports which
  of its checks failed, in the order of `checks`. Under a mask only lanes that count are checked.
- A prefetch does nothing but, on some machines, save time. Its place may be outside of the memory.
- Attention (`ferrite.ir.program.nodes.Attention`, with coordinates of pointers) stands in loops over its axes, its
  group and its rows, and does one row: `lanes` keys at a time, of which `copies` blocks are under way at once. Where
  gradients of keys and values are wanted it stands in loops over its axes and its keys, and does one key, `lanes` rows
  at a time.
- A store that is `atomic` may meet others at the same element at the same time.
- A sort is one block: its lanes hold all that is sorted. Longer sorts, calls and collectives are not kernels.

On a GPU (`warps` is not 0) the meaning is the same, and the loops say how programs and their blocks are made:
- Parallel and vector loops at the top, one directly inside the other, are the grid: a program has one iteration of a
  parallel loop, and a block of `lanes` iterations of a vector loop.
- A vector or reduction loop inside a program is a dimension of its block: one block where `lanes` hold the extent, a
  loop over blocks of `lanes` elsewhere; with one lane it is a loop in order.
- `copies` of a serial or reduction loop are iterations, or blocks, whose loads are under way at once. Those of the last
  but one vector loop of the grid are blocks that programs go through before the next block of the loop inside it.
- Where a product of two factors is all that updates a sum in a reduction loop, directly in a block of two dimensions
  of which each factor has one, matrix units add up products of blocks.

A grouped kernel has `problems`: its body is done for each of them, in any order or at once. A problem has pointers of
its own, and says what the sizes are: `arguments` are the pointers of the first problem, those of the second, and so on,
and no sizes. What one problem writes, no other reads or writes.

A kernel with `resident` programs has a grid of so many, each of which goes through blocks, one after the other: while
one is stored, factors of the next are loaded. These it may load by descriptors.

Kernels are values. `ferrite.ir.kernel.canonical` renames what is local by position, so that kernels that do the same
are equal and are compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal as OneOf

import torch

from ferrite.ir.expr import Const, Data, Expr, Op, data_of, indices_of, nodes_of
from ferrite.ir.index.algebra import TEXT, Axis, Index, Symbol
from ferrite.ir.program.loop_operations import NOWHERE, Attention, Mode, Origin
from ferrite.ir.scalar import STOPPING
from ferrite.ir.types import is_integer

LoopKind = OneOf["serial", "parallel", "vector", "unrolled", "reduction", "scan", "sort"]
Access = OneOf["read", "write", "both"]
INDEPENDENT = ("parallel", "vector", "reduction")
OWN = "own"
# Elements: where a length of a grouped kernel is a multiple of this in all problems, vectors are masked as a whole or
# not at all, and code says so.
MASK_MULTIPLE = 16


@dataclass(frozen=True)
class Pointer:
    """`once`: every element is read once, and all of it is too much for a cache: nothing of it need stay there.
    `again`: several loops read the same, and all of it is too much: what is read should stay until the last has."""

    name: str
    dtype: torch.dtype
    access: Access = "read"
    once: bool = False
    again: bool = False


@dataclass(frozen=True)
class Loop:
    axis: Axis
    kind: LoopKind
    body: tuple[Statement, ...]
    lanes: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Scratch:
    """Undefined at first; there until the end of the block it stands in."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]


@dataclass(frozen=True)
class Let:
    name: str
    value: Expr


@dataclass(frozen=True)
class State:
    """`combine` is for kind "own": the combined state over parameters, left state first. It has no identity: what comes
    first is the state."""

    kind: str
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    combine: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Accumulate:
    states: tuple[State, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Update:
    """`state` is the first of its names."""

    state: str
    values: tuple[Expr, ...]


@dataclass(frozen=True)
class Store:
    buffer: str
    coordinates: tuple[Index, ...]
    value: Expr
    mode: Mode = "set"
    atomic: bool = False


@dataclass(frozen=True)
class When:
    condition: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Prefetch:
    buffer: str
    coordinates: tuple[Index, ...]


@dataclass(frozen=True)
class Attend:
    operation: Attention
    lanes: int = 1
    copies: int = 1

    @property
    def is_by_keys(self) -> bool:
        """Whether it does one key, not one row."""
        return self.operation.gradients is not None and self.operation.destinations[0] is None

    @property
    def begins_at_end(self) -> bool:
        """Whether the last rows are begun first: with a causal mask they take longest."""
        return not self.is_by_keys and bool(self.operation.lists)

    @property
    def outer(self) -> tuple[Axis, ...]:
        """The axes of loops around."""
        one = self.operation
        return (*one.axes, one.keys) if self.is_by_keys else (*one.axes, one.group, one.rows)

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The axes of its own."""
        return tuple(each for each in self.operation.all_axes if each not in self.outer)


Statement = Loop | Scratch | Let | Accumulate | Update | Store | When | Prefetch | Attend


@dataclass(frozen=True)
class Kernel:
    """`origins` say where it comes from; they take no part in equality. `warps`: of one program on a GPU, 32 threads
    each; lanes are blocks then. 0: for no GPU. `problems`: of a grouped kernel, the sizes of each. `resident`: so many
    programs are started, and each goes through blocks of the grid; 0: a program for each."""

    pointers: tuple[Pointer, ...]
    sizes: tuple[Symbol, ...]
    body: tuple[Statement, ...]
    origins: tuple[Origin, ...] = field(default=(NOWHERE,), compare=False)
    warps: int = 0
    problems: tuple[tuple[int, ...], ...] = ()
    resident: int = 0

    @property
    def arguments(self) -> tuple[Pointer, ...]:
        """The pointers that a launch is given."""
        return self.pointers * max(len(self.problems), 1)

    def __str__(self) -> str:
        from ferrite.ir.kernel.text import kernel_text

        return kernel_text(self)


# --- looking in -------------------------------------------------------------------------------------------------------


def inner(statement: Statement) -> tuple[Statement, ...]:
    """The block of a statement that has one."""
    return statement.body if isinstance(statement, Loop | Accumulate | When) else ()


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, in the order of the text."""
    for statement in body:
        yield statement
        yield from walk(inner(statement))


def values_of(statement: Statement) -> tuple[Expr, ...]:
    """The expressions that stand in a statement itself, not in its block."""
    match statement:
        case Let(value=value) | Store(value=value) | When(condition=value):
            return (value,)
        case Update(values=values):
            return values
        case Attend(operation=operation):
            return operation.values
    return ()


def indices_in(statement: Statement) -> tuple[Index, ...]:
    """The indices that stand in a statement itself: extents, sizes, coordinates."""
    match statement:
        case Loop(axis=axis):
            return (axis.extent,)
        case Scratch(sizes=sizes):
            return sizes
        case Store(coordinates=coordinates) | Prefetch(coordinates=coordinates):
            return coordinates
        case Attend(operation=operation):
            wanted = [each for each in operation.destinations if each is not None]
            return (*(each.extent for each in statement.inner), *(at for each in wanted for at in each.coordinates))
    return ()


def nodes_in(statement: Statement) -> list[Expr]:
    """Every expression that a statement itself evaluates, operands first, those inside indices too."""
    reads = [value for index in indices_in(statement) for value in data_of(index)]
    return nodes_of(*reads, *values_of(statement))


def checks(kernel: Kernel) -> list[Data]:
    """What is read from memory and used as an index, each once, in the order in which a failure is numbered."""
    found: dict[Data, None] = {}
    for statement in walk(kernel.body):
        indices = [index for item in nodes_in(statement) for index in indices_of(item)]
        for index in (*indices, *indices_in(statement)):
            atoms = [atom for atom in index.atoms if isinstance(atom, Data)]
            found.update(dict.fromkeys(sorted(atoms, key=TEXT)))
    return list(found)


def may_stop(kernel: Kernel) -> bool:
    """Whether a kernel can fail: it checks an index, or divides integers by what may be zero."""
    return bool(checks(kernel)) or any(divides(item) for each in walk(kernel.body) for item in computed(each))


def computed(statement: Statement) -> list[Expr]:
    """What a statement evaluates itself, and where it updates states of its own kind, how these become one."""
    combined = (
        [value for state in statement.states for value in state.combine] if isinstance(statement, Accumulate) else []
    )
    return [*nodes_in(statement), *nodes_of(*combined)]


def divides(item: Expr) -> bool:
    if not isinstance(item, Op) or item.name not in STOPPING or not is_integer(item.dtype):
        return False
    divisor = item.operands[1]
    return not isinstance(divisor, Const) or divisor.value == 0
