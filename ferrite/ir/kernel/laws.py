"""The laws of a kernel; a kernel that breaks one is a bug of the scheduler.

K1   names are identifiers, and none names two things that are in scope together
K2   what is read or written is a pointer, with one coordinate, or a tile in scope, with one per dimension
K3   a pointer is only read, or only written, where it says so; combining with what is there is both
K4   indices use the kernel's sizes and the axes of the loops around; sizes, places of prefetches and extents read no
     memory, but for extents of serial loops
K5   loads and stored values have the type of the memory; operands fit their operators; a condition is a bool
K6   a local value is defined before it is used, in a block around, with the type it is used with
K7   a state is known, has as many parts as its kind, and is updated inside its block with what its kind takes, or with
     a whole state; inside the block it is read only where every loop between is serial, a scan or a sort; no loop
     stands between a scan or a sort and its updates; what is sorted are integers, in one block, and their state the
     least
K8   only vector, reduction and scan loops have lanes, on a GPU a power of two; an unrolled one has a number of
     iterations; no parallel loop stands in any but a serial or parallel one
K9   iterations of independent loops do not store to the same element, unless atomically: coordinates depend on every
     such axis; what combines at a place that memory decides is atomic, unless the axes keep the places apart: 64*d + j
     with j below 64
K10  a tile has a largest size, known now; what is read or written is inside of it, but for reads that a mask guards
K11  a grouped kernel is for a GPU; every problem has a number for each size, within its bounds; no index is checked
K12  attention stands in loops over its axes, and over its rows or keys, and keeps P17; its blocks on a GPU are powers
     of two that divide the sides of blocks in lists; all loops around say where its results go
K13  a kernel whose programs are resident is for a GPU, and is not grouped
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field

import torch

from ferrite.ir.expr import Data, Expr, Load, Local, Masked, Param, data_of, indices_of, nodes_of
from ferrite.ir.expr_laws import wrong_data, wrong_type
from ferrite.ir.index.algebra import ZERO, Axis, Index, Number, Symbol
from ferrite.ir.index.nested_bounds import inside_in_loops
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.kernel.distinct_places import keeps_apart
from ferrite.ir.kernel.nodes import (
    INDEPENDENT,
    OWN,
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    Prefetch,
    Scratch,
    State,
    Statement,
    Store,
    Update,
    When,
    checks,
    indices_in,
    nodes_in,
)
from ferrite.ir.program.attention_laws import check_attention
from ferrite.ir.states import STATES
from ferrite.ir.types import is_integer, short

IN_ORDER = ("scan", "sort")
WITH_LANES = ("vector", "reduction", *IN_ORDER)


def verify_kernel(kernel: Kernel) -> Kernel:
    """The kernel itself, if it keeps every law. One walk, linear in its size for a fixed depth of loops."""
    check = _Check(kernel)
    check.block(kernel.body)
    for problem in kernel.problems:
        check.problem(kernel, problem)
    if kernel.resident and (kernel.resident < 0 or not kernel.warps or kernel.problems):
        raise InvalidProgram("K13", f"{kernel.resident} programs cannot be resident")
    return kernel


@dataclass(frozen=True)
class _Memory:
    dtype: torch.dtype
    dimensions: int
    sizes: tuple[Index, ...] = ()  # of a tile
    reads: bool = True
    writes: bool = True
    depth: int = 0  # loops around where it begins


@dataclass(frozen=True)
class _Named:
    """A local value; `depth` is the number of loops around where its axes end; `open` while its block runs."""

    dtype: torch.dtype
    depth: int
    open: State | None = None


@dataclass
class _Scope:
    memory: dict[str, _Memory] = field(default_factory=dict)
    names: dict[str, _Named] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def inner(self) -> _Scope:
        return _Scope(dict(self.memory), dict(self.names), set(self.taken))


class _Check:
    def __init__(self, kernel: Kernel) -> None:
        self.sizes = frozenset(kernel.sizes)
        self.blocks = kernel.warps > 0
        self.loops: list[Loop] = []
        self.scope = _Scope()
        for name in (*(pointer.name for pointer in kernel.pointers), *(size.name for size in kernel.sizes)):
            self.name(name)
        for pointer in kernel.pointers:
            reads, writes = pointer.access != "write", pointer.access != "read"
            self.scope.memory[pointer.name] = _Memory(pointer.dtype, 1, (), reads, writes)

    def problem(self, kernel: Kernel, problem: tuple[int, ...]) -> None:
        if not kernel.warps or checks(kernel):
            raise InvalidProgram("K11", "a grouped kernel is for no GPU, or checks indices")
        bounds = [(size.lowest, size.highest) for size in kernel.sizes]
        if len(problem) != len(bounds):
            raise InvalidProgram("K11", f"a problem with {len(problem)} sizes of {len(bounds)}")
        for count, (low, high) in zip(problem, bounds, strict=True):
            if (low is not None and count < low) or (high is not None and count > high):
                raise InvalidProgram("K11", f"a problem of size {count}, which is to be from {low} to {high}")

    def name(self, name: str) -> None:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidProgram("K1", f"{name!r} is no identifier")
        if name in self.scope.taken:
            raise InvalidProgram("K1", f"{name} names two things")
        self.scope.taken.add(name)

    def block(self, body: tuple[Statement, ...]) -> None:
        around, self.scope = self.scope, self.scope.inner()
        for statement in body:
            self.statement(statement)
        self.scope = around

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Attend):
            self.attend(statement)
            return
        self.indices(statement)
        self.values(statement)
        match statement:
            case Loop():
                self.loop(statement)
            case Scratch():
                if any(size.high is None for size in statement.sizes):
                    raise InvalidProgram("K10", f"{statement.name} has no largest size")
                self.name(statement.name)
                tile = _Memory(statement.dtype, len(statement.sizes), statement.sizes, depth=len(self.loops))
                self.scope.memory[statement.name] = tile
            case Let():
                self.name(statement.name)
                self.scope.names[statement.name] = _Named(statement.value.dtype, len(self.loops))
            case Accumulate():
                self.accumulate(statement)
            case Update():
                self.update(statement)
            case Store():
                self.store(statement)
            case When():
                if statement.condition.dtype != torch.bool:
                    raise InvalidProgram("K5", f"the condition {statement.condition} is no bool")
                self.block(statement.body)
            case Prefetch():
                if not self.accessed(statement.buffer, statement.coordinates).reads:
                    raise InvalidProgram("K3", f"{statement.buffer} is expected to be read, but is only written")

    # --- indices and values -------------------------------------------------------------------------------------------

    def indices(self, statement: Statement) -> None:
        for index in indices_in(statement):
            ragged = isinstance(statement, Loop) and statement.kind == "serial"
            if isinstance(statement, Loop | Scratch | Prefetch) and data_of(index) and not ragged:
                raise InvalidProgram("K4", f"{index} reads memory")
            self.index(index)

    def index(self, index: Index) -> None:
        axes = {loop.axis for loop in self.loops}
        for atom in index.atoms:
            if isinstance(atom, Symbol) and atom not in self.sizes:
                raise InvalidProgram("K4", f"{atom} is no size of the kernel")
            if isinstance(atom, Axis) and atom not in axes:
                raise InvalidProgram("K4", f"{atom} is no axis of a loop around")
            if isinstance(atom, Data):
                self.index(atom.extent)
        problem = wrong_data(index)
        if problem:
            raise InvalidProgram("K5", problem)

    def values(self, statement: Statement) -> None:
        guarded = self.guarded(statement)
        for item in nodes_in(statement):
            is_unknown = isinstance(item, Param) and not isinstance(statement, Attend)
            problem = f"{item} has no value here" if is_unknown else wrong_type(item)
            if problem:
                raise InvalidProgram("K5", f"{problem}, in {type(statement).__name__}")
            for index in indices_of(item):
                self.index(index)
            if isinstance(item, Load):
                memory = self.accessed(item.buffer, item.coordinates)
                if item not in guarded:
                    self.inside(item.buffer, item.coordinates)
                if not memory.reads:
                    raise InvalidProgram("K3", f"{item.buffer} is read, but says it is only written")
                if memory.dtype != item.dtype:
                    raise InvalidProgram("K5", f"{item} is loaded as {short(item.dtype)}, not {short(memory.dtype)}")
            if isinstance(item, Local):
                self.local(item)

    def guarded(self, statement: Statement) -> frozenset[Expr]:
        """What is computed only where a mask says so."""
        values = [item.value for item in nodes_in(statement) if isinstance(item, Masked)]
        return frozenset(nodes_of(*values)) if values else frozenset()

    def accessed(self, name: str, coordinates: tuple[Index, ...]) -> _Memory:
        memory = self.scope.memory.get(name)
        if memory is None:
            raise InvalidProgram("K2", f"{name} is no pointer and no tile in scope")
        if len(coordinates) != memory.dimensions:
            raise InvalidProgram("K2", f"{len(coordinates)} coordinates for {name} of {memory.dimensions}")
        return memory

    def inside(self, name: str, coordinates: tuple[Index, ...]) -> None:
        for index, size in () if self.is_empty() else zip(coordinates, self.scope.memory[name].sizes, strict=False):
            if not inside_in_loops(index, size):
                raise InvalidProgram("K10", f"{name}[{index}] may be outside of a tile of {size}")

    def is_empty(self) -> bool:
        """Whether nothing is done here, as a loop around has no iterations."""
        return any(loop.axis.extent is ZERO for loop in self.loops)

    def local(self, item: Local) -> None:
        found = self.scope.names.get(item.name)
        if found is None or found.dtype != item.dtype:
            raise InvalidProgram("K6", f"{item.name} is {'of another type' if found else 'not defined'} here")
        if found.open is not None and any(loop.kind not in ("serial", *IN_ORDER) for loop in self.loops[found.depth :]):
            raise InvalidProgram("K7", f"{item.name} is read before its block ends, in a loop whose order is free")

    # --- statements ---------------------------------------------------------------------------------------------------

    def loop(self, loop: Loop) -> None:
        kinds = [outer.kind for outer in self.loops]
        if min(loop.lanes, loop.copies) < 1 or (loop.lanes > 1 and loop.kind not in WITH_LANES):
            raise InvalidProgram("K8", f"{loop.lanes} lanes and {loop.copies} copies in a {loop.kind} loop")
        if self.blocks and loop.lanes & (loop.lanes - 1):
            raise InvalidProgram("K8", f"a block of {loop.lanes} lanes: no power of two")
        if loop.kind == "unrolled" and not isinstance(loop.axis.extent, Number):
            raise InvalidProgram("K8", f"{loop.axis} is unrolled, but has {loop.axis.extent} iterations")
        if loop.kind == "parallel" and any(kind not in ("serial", "parallel") for kind in kinds):
            raise InvalidProgram("K8", f"the parallel loop {loop.axis} stands in a {kinds[-1]} loop")
        around, self.scope = self.scope, self.scope.inner()
        self.name(loop.axis.name)
        self.loops.append(loop)
        self.block(loop.body)
        self.loops.pop()
        self.scope = around

    def attend(self, statement: Attend) -> None:
        one, loops = statement.operation, {loop.axis: loop for loop in self.loops}
        check_attention(one, "K12")
        if not set(statement.outer) <= loops.keys():
            raise InvalidProgram("K12", f"no loops over {statement.outer} around attention")
        if any(each in loops for each in statement.inner):
            raise InvalidProgram("K12", "a loop over an axis of attention itself")
        if one.gradients is not None and one.destinations[0] is not None and any(one.destinations[1:]):
            raise InvalidProgram("K12", "gradients of rows and of keys in one loop")
        mine, sides = loops[statement.outer[-1]].lanes, one.block_sides
        sides = sides[::-1] if statement.is_by_keys else sides
        for lanes, side in zip((mine, statement.lanes), sides, strict=True):
            if self.blocks and (lanes < 1 or lanes & (lanes - 1) or (one.lists and side % lanes)):
                raise InvalidProgram("K12", f"{lanes} lanes of attention in blocks of {side}")
        before = list(self.loops)
        self.loops += [Loop(each, "serial", ()) for each in statement.inner]
        for index in indices_in(statement):
            self.index(index)
        self.values(statement)
        for target in one.destinations:
            if target is None:
                continue
            memory = self.accessed(target.buffer, target.coordinates)
            if not memory.writes:
                raise InvalidProgram("K3", f"{target.buffer} is written, but does not say so")
            used = {atom for index in target.coordinates for atom in index.atoms}
            for loop in before:
                if loop.axis not in used and loop.axis.high != 0:
                    raise InvalidProgram("K12", f"{target.buffer} is stored at one place for every {loop.axis}")
        self.loops = before

    def accumulate(self, statement: Accumulate) -> None:
        depth = len(self.loops)
        for state in statement.states:
            self.state(state)
            for name, dtype in zip(state.names, state.dtypes, strict=True):
                self.name(name)
                self.scope.names[name] = _Named(dtype, depth, state)
        self.block(statement.body)
        for state in statement.states:
            for name, dtype in zip(state.names, state.dtypes, strict=True):
                self.scope.names[name] = _Named(dtype, depth)

    def state(self, state: State) -> None:
        row = STATES.get(state.kind)
        if row is None and state.kind != OWN:
            raise InvalidProgram("K7", f"no state {state.kind!r}")
        parts = row.gives if row else len(state.combine)
        if not parts or (len(state.names), len(state.dtypes)) != (parts, parts) or (row and state.combine):
            raise InvalidProgram("K7", f"{state.kind} with {len(state.names)} names and {len(state.dtypes)} types")
        if row and row.name.startswith("arg") and not is_integer(state.dtypes[1]):
            raise InvalidProgram("K7", f"the place of {row.name} is an integer, not {short(state.dtypes[1])}")
        combined = row.combine(state.dtypes) if row else state.combine
        types = state.dtypes * 2
        for item in nodes_of(*combined):
            if isinstance(item, Param) and types[item.position : item.position + 1] != (item.dtype,):
                raise InvalidProgram("K7", f"{item} is no part of two states {state.kind}")
            if item.loads or item.atoms or isinstance(item, Local):
                raise InvalidProgram("K7", f"combining {state.kind} uses {item}")
            problem = wrong_type(item)
            if problem:
                raise InvalidProgram("K7", f"{state.kind} of {', '.join(map(short, state.dtypes))}: {problem}")
        if tuple(item.dtype for item in combined) != state.dtypes:
            raise InvalidProgram("K7", f"combining {state.kind} gives other types than it takes")

    def update(self, statement: Update) -> None:
        named = self.scope.names.get(statement.state)
        if named is None or named.open is None or named.open.names[0] != statement.state:
            raise InvalidProgram("K7", f"{statement.state} is no state whose block is around")
        state = named.open
        inside = [loop.kind for loop in self.loops[named.depth :]]
        if not set(IN_ORDER).isdisjoint(inside[:-1]):
            raise InvalidProgram("K7", f"{statement.state} is updated in a {inside[-1]} loop inside of a scan")
        if "sort" in inside[-1:]:
            self.sorted_state(state, self.loops[-1])
        takes = STATES[state.kind].takes if state.kind in STATES else len(state.names)
        types = tuple(value.dtype for value in statement.values)
        if types not in (state.dtypes[:takes], state.dtypes):
            raise InvalidProgram("K7", f"{', '.join(map(short, types)) or 'nothing'} as an update of {state.kind}")

    def sorted_state(self, state: State, loop: Loop) -> None:
        high = loop.axis.extent.high
        if state.kind != "amin" or not is_integer(state.dtypes[0]):
            raise InvalidProgram("K7", f"{state.kind} of {short(state.dtypes[0])} is sorted: not the least of integers")
        if high is None or loop.lanes < high:
            raise InvalidProgram("K7", f"{loop.axis.extent} places are sorted by {loop.lanes} lanes")

    def store(self, store: Store) -> None:
        memory = self.accessed(store.buffer, store.coordinates)
        self.inside(store.buffer, store.coordinates)
        if not memory.writes or (store.mode != "set" and not memory.reads):
            raise InvalidProgram("K3", f"{store.buffer} is written by {store.mode}, but does not say so")
        if memory.dtype != store.value.dtype:
            raise InvalidProgram("K5", f"{short(store.value.dtype)} is stored into {store.buffer}")
        if store.atomic or self.is_empty():
            return
        around = self.loops[memory.depth :]
        kinds = (*INDEPENDENT, *IN_ORDER)
        free = [loop for loop in around if loop.kind in kinds and loop.axis.high != 0]  # runs more than once
        used = self.axes_of(store)
        for loop in free:
            if loop.axis not in used:
                raise InvalidProgram("K9", f"{store.buffer} is stored at one place for every {loop.axis}")
        axes = {loop.axis for loop in free}
        if free and store.mode != "set" and not all(keeps_apart(index, axes) for index in store.coordinates):
            raise InvalidProgram("K9", f"{store.buffer} is combined, not atomically, where memory says")

    def axes_of(self, store: Store) -> set[Axis]:
        """The axes that the place of a store depends on, through local values too."""
        roots = [value for index in store.coordinates for value in data_of(index)]
        indices = [*store.coordinates, *(index for item in nodes_of(*roots) for index in indices_of(item))]
        used = {atom for index in indices for atom in index.atoms if isinstance(atom, Axis)}
        for item in nodes_of(*roots):
            if isinstance(item, Local):
                used.update(loop.axis for loop in self.loops[: self.scope.names[item.name].depth])
        return used
