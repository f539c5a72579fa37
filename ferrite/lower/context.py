"""What a lowering function works with: making values, looking at them, reducing, writing, calling.

Every lowering is `f(ctx, *args)`: tensors arrive as `Value`, sizes as `Index` or int, everything else as it is. It
returns values, and nothing is computed until something needs memory. `ctx.out` is torch's picture of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.ir import Data, Expr, Load, cast, const, index_value, nodes_of
from ferrite.ir.index import ONE, ZERO, Axis, Index, Number, Symbol, as_index, axis
from ferrite.ir.program import NOWHERE, Buffer, Combine, Compute, Operation, Origin, Reduce, Scan, Sort, Store, Target
from ferrite.lower.materialise import from_several
from ferrite.lower.sizes import Sizes
from ferrite.lower.value import Box, Value, broadcast_place, own_axes, whole
from ferrite.lower.windows import Strided, by_coordinates, by_torch

Dims = Sequence[Index | int]


def known(index: Index | int) -> int | None:
    """The number, where an index is one."""
    if isinstance(index, int):
        return index
    return index.value if isinstance(index, Number) else None


def contiguous(sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Strides of a dense tensor, last dimension innermost; an empty dimension counts as one, as in torch."""
    strides: list[Index] = []
    step: Index = ONE
    for size in reversed(sizes):
        strides.append(step)
        step = step * (ONE if size is ZERO else size)
    return tuple(reversed(strides))


class Context:
    """The program so far, and the ways to add to it."""

    def __init__(self) -> None:
        self.sizes = Sizes()
        self.buffers: dict[str, Buffer] = {}
        self.operations: list[Operation] = []
        self.objects: dict[str, Any] = {}
        self.symbols: dict[str, Expr] = {}  # numbers that are no index, by the names torch has for them
        self.numbers: dict[Expr, Any] = {}  # and torch's picture of such a number
        self.pending: dict[Box, None] = {}  # boxes whose expressions read memory that may still be written
        self.bound: set[Symbol] = set()  # symbols that have their values by now
        self.asserted: set[Expr] = set()  # conditions on them that hold by now
        self.exchanges: list[Any] = []  # collectives that nobody has waited for
        self.origin: Origin = NOWHERE
        self.out: Any = None
        self.operator: Any = None

    # --- numbers ------------------------------------------------------------------------------------------------------

    def index(self, value: Index | int | torch.SymInt) -> Index:
        return value if isinstance(value, Index) else self.sizes.index(value)

    def shape(self, fake: torch.Tensor) -> tuple[Index, ...]:
        return self.sizes.indices(fake.shape)

    @property
    def out_sizes(self) -> tuple[Index, ...]:
        """The sizes torch gives the (first) result."""
        fake = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        return self.shape(fake)

    @property
    def out_dtype(self) -> torch.dtype:
        fake = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        dtype: torch.dtype = fake.dtype
        return dtype

    def is_used(self, place: int) -> bool:
        """Whether anything reads this one of several results; yes, where that is not known."""
        return True

    # --- making values ------------------------------------------------------------------------------------------------

    def lazy(self, sizes: Dims, expr: Expr, device: torch.device) -> Value:
        """A tensor whose elements are an expression over its own axes; computed where it is used."""
        box = Box(tuple(map(as_index, sizes)), expr.dtype, device, expr=expr, origins=(self.origin,))
        if expr.loads:
            self.pending[box] = None
        return whole(box)

    def elements(self, value: Value | Index | Expr | bool | int | float | complex, sizes: Sequence[Index]) -> Expr:
        """The element of a value, broadcast to sizes, over the axes of those sizes. Numbers become constants."""
        if isinstance(value, Value):
            return value.at(broadcast_place(value.sizes, sizes))
        if isinstance(value, Expr):
            return value
        if isinstance(value, Index):
            return index_value(value)
        kind = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}[type(value)]
        return const(value, kind)

    def fill(self, sizes: Dims, value: bool | int | float | complex, dtype: torch.dtype, device: torch.device) -> Value:
        return self.lazy(sizes, const(value, dtype), device)

    def convert(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        return self.lazy(value.sizes, cast(self.elements(value, value.sizes), dtype), value.device)

    # --- loops --------------------------------------------------------------------------------------------------------

    def reduce(
        self,
        kind: str,
        sizes: Sequence[Index],
        over: Sequence[Index],
        values: Sequence[Callable[[Sequence[Index], Sequence[Index]], Expr]] | Sequence[Expr],
        dtypes: Sequence[torch.dtype | None],
        device: torch.device,
    ) -> tuple[Value | None, ...]:
        """Combine over axes r0, r1, ...: one value per result, of these sizes; a dtype of None: not wanted.

        Values are expressions over i0.. (of `sizes`) and r0.. (of `over`), or functions of both that give them.
        """
        outer, inner = own_axes(sizes), own_axes(over, "r")
        made = [value(outer, inner) if callable(value) else value for value in values]
        targets, results = self.targets(sizes, dtypes, device)
        axes = tuple(item for item in outer if isinstance(item, Axis))
        reduced = tuple(item for item in inner if isinstance(item, Axis))
        self.add(Reduce(axes, reduced, kind, tuple(made), targets, self.origin))
        return results

    def scan(
        self,
        combine: Combine,
        sizes: Sequence[Index],
        along: int,
        values: Sequence[Expr],
        dtypes: Sequence[torch.dtype | None],
        device: torch.device,
    ) -> tuple[Value | None, ...]:
        """Inclusive prefixes along a dimension; values are expressions over the axes of `sizes`."""
        axes, line = self.full_axes(sizes, along)
        targets, results = self.targets(sizes, dtypes, device, line)
        self.add(Scan(axes, line, combine, tuple(values), targets, self.origin))
        return results

    def sort(
        self,
        sizes: Sequence[Index],
        along: int,
        keys: Sequence[Expr],
        dtypes: Sequence[torch.dtype | None],
        descending: bool,
        stable: bool,
        device: torch.device,
    ) -> tuple[Value | None, ...]:
        """Keys sorted along a dimension, and last the places they came from."""
        axes, line = self.full_axes(sizes, along)
        targets, results = self.targets(sizes, dtypes, device, line)
        self.add(Sort(axes, line, tuple(keys), targets, descending, stable, self.origin))
        return results

    def full_axes(self, sizes: Sequence[Index], along: int) -> tuple[tuple[Axis, ...], Axis]:
        """The axes of sizes, with one along a dimension even if its size is one."""
        outer = list(own_axes(sizes))
        if not isinstance(outer[along], Axis):
            outer[along] = axis(f"i{along}", sizes[along])
        line = outer[along]
        assert isinstance(line, Axis)
        return tuple(item for item in outer if isinstance(item, Axis)), line

    def targets(
        self,
        sizes: Sequence[Index],
        dtypes: Sequence[torch.dtype | None],
        device: torch.device,
        line: Axis | None = None,
    ) -> tuple[tuple[Target | None, ...], tuple[Value | None, ...]]:
        """Memory for results, and the values that see it."""
        targets: list[Target | None] = []
        results: list[Value | None] = []
        for place, dtype in enumerate(dtypes):
            if dtype is None:
                targets.append(None)
                results.append(None)
                continue
            box = Box(tuple(sizes), dtype, device, origins=(self.origin,))
            box.buffer = self.new_buffer(box, self.wanted_strides(place, sizes))
            axes = [
                line if line is not None and line.name == f"i{k}" else item for k, item in enumerate(own_axes(sizes))
            ]
            targets.append(Target(box.buffer, tuple(axes)))
            results.append(whole(box))
        return tuple(targets), tuple(results)

    def wanted_strides(self, place: int, sizes: Sequence[Index]) -> tuple[Index, ...] | None:
        """Eager's strides of one result, if it has these sizes."""
        fake = self.out[place] if isinstance(self.out, (tuple, list)) and place < len(self.out) else self.out
        if ZERO in sizes:  # torch's picture of a reduction to nothing has other strides than eager
            return None
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided and self.shape(fake) == tuple(sizes):
            return self.dense_strides(fake)
        return None

    def dense_strides(self, fake: torch.Tensor) -> tuple[Index, ...] | None:
        """Strides that memory of its own can have: no element twice."""
        strides = self.sizes.indices(fake.stride())
        sizes = self.shape(fake)
        repeated = any(stride is ZERO and size is not ONE for stride, size in zip(strides, sizes, strict=True))
        return None if repeated and ZERO not in sizes else strides

    # --- memory -------------------------------------------------------------------------------------------------------

    def new_buffer(self, box: Box, strides: Sequence[Index] | None = None, kind: Any = "owned", name: str = "") -> str:
        name = name or f"buf{len(self.buffers)}"
        placed = tuple(strides) if strides is not None else contiguous(box.sizes)
        self.buffers[name] = Buffer(name, box.dtype, box.sizes, placed, ZERO, box.device, kind)
        return name

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def realise(self, box: Box) -> str:
        """Put a pending box into memory, where eager would have it."""
        if box.buffer is not None and box.expr is None:
            return box.buffer
        assert box.expr is not None
        box.buffer = self.new_buffer(box, box.strides)
        axes = own_axes(box.sizes)
        origin = next((item for item in box.origins if item is not NOWHERE), self.origin)
        loops = tuple(item for item in axes if isinstance(item, Axis))
        self.add(Compute(loops, (Store(box.buffer, axes, box.expr),), origin))
        box.expr = None
        self.pending.pop(box, None)
        return box.buffer

    def strided(self, value: Value) -> Strided | None:
        """Strides and offset of a value in its buffer's storage; None where its elements do not lie so."""
        return by_coordinates(self.buffers[self.realise(value.box)], value)

    def buffer_of(self, value: Value, fake: torch.Tensor | None = None) -> str:
        """A buffer that is this value, for a call or an output: a strided window where it can be, else a copy.

        With `fake`, the strides are eager's: a window that has others is copied, dimensions of size one take theirs.
        """
        name = self.realise(value.box)
        buffer = self.buffers[name]
        if buffer.kind == "foreign":
            return name
        wanted = self.sizes.indices(fake.stride()) if fake is not None else None
        if (
            value.is_whole
            and buffer.dtype == value.dtype
            and (wanted is None or buffer.strides == wanted or ZERO in value.sizes)
        ):
            return name

        def fits(found: Strided) -> bool:
            return wanted is None or same_strides(value.sizes, found[0], wanted)

        found = self.strided(value) or by_torch(self, buffer, value, fake)
        if ZERO in value.sizes or not (found is None or fits(found)):
            # where nothing of a dimension of one begins, no coordinate tells, nor that 8*(s//24) is s//3
            found = by_torch(self, buffer, value, fake) or found
        if found is not None and fits(found):
            strides = wanted if wanted is not None else self.filled(value.sizes, found[0])
            return self.window(buffer, value.dtype, value.sizes, strides, found[1])
        return self.realise(self.copied(value, wanted).box)

    def filled(self, sizes: Sequence[Index], strides: Sequence[Index]) -> tuple[Index, ...]:
        """Strides with those of dimensions of size one as a dense tensor would have them."""
        dense = contiguous(sizes)
        return tuple(dense[k] if size is ONE else strides[k] for k, size in enumerate(sizes))

    def window(
        self, base: Buffer, dtype: torch.dtype, sizes: Sequence[Index], strides: Sequence[Index], offset: Index
    ) -> str:
        """A view of a buffer's storage; the same window again is the same buffer."""
        name = f"view{len(self.buffers)}"
        new = Buffer(name, dtype, tuple(sizes), tuple(strides), offset, base.device, "view", base.storage)
        self.buffers[name] = new
        return name

    def copied(self, value: Value, strides: Sequence[Index] | None = None) -> Value:
        """The same elements in memory of their own."""
        new = self.lazy(value.sizes, self.elements(value, value.sizes), value.device)
        new.box.strides = tuple(strides) if strides is not None else None
        self.realise(new.box)
        return new

    def picked(self, value: Value, place: Sequence[Index]) -> Expr:
        """The element at a place that memory decides. The check of that place stays, whatever the elements are: where
        they do not depend on it (all ones), they are read from memory all the same."""
        expr = value.at(place)
        checks = {atom for index in place for atom in index.atoms if isinstance(atom, Data)}
        if checks <= expr.atoms:
            return expr
        self.realise(value.box)
        return value.at(place)

    def in_memory(self, value: Value) -> Value:
        """The value, with its box realised."""
        self.realise(value.box)
        return value

    # --- writing ------------------------------------------------------------------------------------------------------

    def before_write(self, storage: str) -> None:
        """Pending values that read this storage read it now, before it changes."""
        for box in list(self.pending):
            if box.expr is not None and any(self.buffers[name].storage == storage for name in box.expr.loads):
                self.realise(box)

    def write(self, target: Value, source: Value | bool | int | float) -> Value:
        """target.copy_(source): the elements of `source`, broadcast and converted, into the target's memory."""
        expr = cast(self.elements(source, target.sizes), target.dtype)
        if target.box.expr is not None and target.is_whole:  # private and pending: later readers get the new elements
            target.box.expr = expr
            if expr.loads:
                self.pending[target.box] = None
            return target
        name = self.realise(target.box)
        if isinstance(expr, Load) and (expr.buffer, expr.coordinates) == (name, target.coordinates):
            return target  # onto itself
        storage = self.buffers[name].storage
        if self.reads_elsewhere(expr, name, target.coordinates):
            expr = self.kept(expr, target.sizes, target.device)
        self.before_write(storage)
        axes = tuple(item for item in own_axes(target.sizes) if isinstance(item, Axis))
        self.add(Compute(axes, (Store(name, target.coordinates, expr),), self.origin))
        return target

    def reads_elsewhere(self, expr: Expr, name: str, coordinates: Sequence[Index]) -> bool:
        """Whether an expression reads elements of a buffer's storage other than the one about to be written."""
        storage = self.buffers[name].storage
        for item in nodes_of(expr):
            if not isinstance(item, Load) or self.buffers[item.buffer].storage != storage:
                continue
            if item.buffer != name or item.coordinates != tuple(coordinates):
                return True
        return False

    def kept(self, source: Expr, sizes: Sequence[Index], device: torch.device) -> Expr:
        """The same elements, read from memory of their own."""
        value = self.lazy(sizes, source, device)
        self.realise(value.box)
        return self.elements(value, sizes)

    def scatter(self, target: Value, sizes: Sequence[Index], place: Sequence[Index], source: Expr, mode: str) -> None:
        """At every point of `sizes`, store `source` at a place of the target, or combine it with what is there."""
        if mode != "set" and from_several(source, own_axes(sizes)):
            source = self.kept(source, sizes, target.device)
        name = self.realise(target.box)
        if self.reads_elsewhere(source, name, ()):
            source = self.kept(source, sizes, target.device)
        self.before_write(self.buffers[name].storage)
        axes = tuple(item for item in own_axes(sizes) if isinstance(item, Axis))
        self.add(Compute(axes, (Store(name, target.through(place), source, mode),), self.origin))  # type: ignore[arg-type]


def same_strides(sizes: Sequence[Index], left: Sequence[Index], right: Sequence[Index]) -> bool:
    """Equal where a dimension has more than one element."""
    if any(size is ZERO for size in sizes):
        return True
    return all(size is ONE or a is b for size, a, b in zip(sizes, left, right, strict=True))
