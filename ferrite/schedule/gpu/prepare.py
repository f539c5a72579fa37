"""Rewrites of a program before it is grouped: reductions in the forms that programs and blocks like best.

- Where a program holds a row, a softmax statistic is the greatest value, then a sum, and a mean with squared deviations
  is a sum, then a sum: the row is in registers. A longer row is gone through once, with a state that moves.
- The place of the greatest is that of the first that is as great: two plain reductions of a row in registers.
- A reduction with so few results that most of the machine would be idle is done in pieces, each a program, then once
  more over the pieces. How it is cut depends on the sizes alone, so results are the same every time.
- So is a long scan: see `long_scans`. Short rows are sorted by a program: see `sorts`.
- Complex numbers are pairs of floats: see `complex_parts`.
- Numbers of 16 bits that are added up where memory says are added up in 32.
- Small tables are computed again by their readers: see `small_tables`.
- What reads a matrix product of our own goes over its rows (`loops.product_readers`); sums of one with few elements are
  made in pieces, which another kernel adds up.
- Attention of few rows is made in pieces, which another kernel makes one: see `attention_pieces`.
- Gradients of attention are those of rows, and those of keys: see `attention`.
- Doubles that hold numbers of 32 bits are these: see `narrow_doubles`.
- Products of torch are written into their part of a concatenation, where that is aligned: see `loops.out_products`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ferrite.graph import HALVES
from ferrite.ir import (
    ZERO,
    Axis,
    Cast,
    Expr,
    Index,
    Load,
    Number,
    Symbol,
    axis,
    cast,
    choose,
    compare,
    const,
    contiguous_strides,
    data_of,
    either,
    flat_extent,
    flat_place,
    index_value,
    masked,
    nodes_of,
    op,
    rewrite_indices,
)
from ferrite.ir.program import Attention, Buffer, Compute, Operation, Program, Reduce, Scan, Sort, Store, axes_of
from ferrite.machines import MATRIX_UNIT_BYTES, GpuMachine
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of
from ferrite.schedule.gpu import long_scans, sorts
from ferrite.schedule.gpu.attention import blocks_for, refused, with_apart_gradients
from ferrite.schedule.gpu.attention_pieces import pieces_of, with_shared_keys
from ferrite.schedule.gpu.blocks import power_above, power_below, whole_elements
from ferrite.schedule.gpu.complex_parts import with_complex_parts
from ferrite.schedule.gpu.narrow_doubles import with_narrow_doubles
from ferrite.schedule.gpu.products import Tuned, config_for, is_product, problem_of
from ferrite.schedule.gpu.row_pieces import Cut, cut_of, in_pieces, is_reduced, related
from ferrite.schedule.gpu.small_tables import with_small_tables_recomputed
from ferrite.schedule.loops.attention import with_heads_as_rows
from ferrite.schedule.loops.out_products import with_out_products
from ferrite.schedule.loops.product_readers import with_whole_rows
from ferrite.schedule.loops.reductions import (
    EXTREME_OF,
    SPLIT_KINDS,
    STORE_MODES,
    Preparation,
    count_value,
    is_empty,
    neutral_value,
    sums_exactly,
)

EXTREMES = {**EXTREME_OF, "argmax_of_window": "amax"}
MIN_IMAGE = 256  # elements of an image whose statistics are made first: of fewer, these would be much memory
MAX_MEASURE = 1e18  # of what deviations are counted from: sums of larger ones would be infinite, and the mean with them


def prepare(program: Program, machine: GpuMachine, device: str, tuned: Tuned) -> Program:
    program = with_out_products(program, device, functools.partial(is_quick_part, machine))
    program = with_apart_gradients(program)
    program = with_whole_rows(program, is_product)
    program = with_small_tables_recomputed(program, device, machine)
    program = with_complex_parts(program, device)
    return with_narrow_doubles(GpuPreparation(program, machine, device, tuned).program(program), device)


def is_quick_part(machine: GpuMachine, part: Buffer) -> bool:
    """Whether a product is as fast into a part of a tensor: where all rows of it begin at multiples of 16 bytes; or of
    a few columns, which take no time."""
    if isinstance(part.sizes[-1], Number) and part.sizes[-1].value <= machine.max_thin_columns:
        return True
    steps = (*part.strides[:-1], part.offset)
    return all(isinstance(step, Number) and step.value * part.dtype.itemsize % MATRIX_UNIT_BYTES == 0 for step in steps)


class GpuPreparation(Preparation):
    def __init__(self, program: Program, machine: GpuMachine, device: str, tuned: Tuned) -> None:
        super().__init__(
            program, device, machine.kept_elements // 4, machine.enough_programs // 2, machine.min_split_elements
        )
        self.machine, self.tuned = machine, tuned
        self.cut_already: list[Operation] = []  # what makes pieces, or adds them up

    def attention(self, operation: Attention) -> Iterator[Operation]:
        """In the rows that a program has, and in pieces where there are too few of them."""
        if refused(operation) is not None:
            yield operation
            return
        together = with_heads_as_rows(operation, blocks_for(operation, self.machine).outer)
        pieces = pieces_of(together, self.machine)
        if pieces == 1:
            yield together
            return
        part = functools.partial(self.part, operation)
        for each in with_shared_keys(together, pieces, part, lambda name: self.buffers[name].dtype):
            yield from [each] if isinstance(each, Attention) else self.rewritten(each)

    def rewritten(self, operation: Operation) -> Iterator[Operation]:
        if isinstance(operation, Compute) and (store := self.narrow_sum(operation)) is not None:
            yield from self.widened(operation, store)
            return
        if isinstance(operation, Attention) and self.is_here(operation):
            yield from self.attention(operation)
            return
        if isinstance(operation, Sort) and self.is_here(operation) and sorts.is_short(operation, self.machine):
            yield from sorts.in_registers(operation, self.buffers, functools.partial(self.part, operation))
            return
        if isinstance(operation, Scan) and self.is_here(operation):
            operation = long_scans.simpler(operation)
            if long_scans.is_long(operation, self.machine):
                part = functools.partial(self.part, operation)
                yield from long_scans.in_pieces(operation, self.machine, self.buffers, part)
                return
        if not isinstance(operation, Reduce) or not self.is_here(operation):
            yield operation
            return
        operation = self.plainer(operation)
        if operation.kind == "welford" and (parts := self.statistics_in_pieces(operation)) is not None:
            self.cut_already += parts
            yield from parts
            return
        yield from self.simpler(operation)

    def program(self, program: Program) -> Program:
        operations = [new for operation in program.operations for new in self.rewritten(operation)]
        operations = [new for operation in self.with_row_pieces(operations) for new in self.cut(operation)]
        return replace(program, buffers=tuple(self.buffers.values()), operations=tuple(operations))

    def cut(self, operation: Operation) -> Iterator[Operation]:
        is_cut = any(operation is each for each in self.cut_already)
        if isinstance(operation, Reduce) and self.is_here(operation) and not is_cut:
            yield from self.split(operation)
        else:
            yield operation

    def plainer(self, operation: Reduce) -> Reduce:
        """A greatest value of which nobody wants the place is just that. Statistics of numbers of 32 bits, which a
        processor makes in 64, are made in 32, as eager's are on a GPU."""
        if operation.kind in EXTREMES and operation.destinations[1] is None:
            return replace(operation, kind=EXTREMES[operation.kind], destinations=operation.destinations[:1])
        (value, *_) = operation.values
        is_wide = operation.kind == "welford" and isinstance(value, Cast) and value.dtype is torch.float64
        if is_wide and isinstance(value, Cast) and value.arg.dtype is torch.float32:
            return replace(operation, values=(value.arg,))
        return operation

    def narrow_sum(self, operation: Compute) -> Store | None:
        """The store of an operation, if it adds numbers of 16 bits up where memory says."""
        (store, *more) = operation.stores
        destination = self.buffers[store.buffer]
        if more or store.mode != "add" or destination.dtype not in HALVES or destination.device.type != self.device:
            return None
        return store if any(map(data_of, store.coordinates)) and store.buffer not in store.value.loads else None

    def widened(self, operation: Compute, store: Store) -> Iterator[Operation]:
        """Adds them up in 32 bits, as eager does for most such operators: rounded to 8 digits after each addition, the
        256th one of ones would be lost."""
        destination = self.buffers[store.buffer]
        axes = tuple(axis(f"w{place}", size) for place, size in enumerate(destination.sizes))
        name = f"wide{len(self.buffers)}"
        while name in self.buffers:
            name += "_"
        self.buffers[name] = Buffer(
            name, torch.float32, destination.sizes, contiguous_strides(destination.sizes), ZERO, destination.device
        )
        before = cast(Load.intern(store.buffer, axes, destination.dtype), torch.float32)
        yield Compute(axes, (Store(name, axes, before),), operation.origin)
        addend = cast(store.value, torch.float32)
        yield replace(operation, stores=(replace(store, buffer=name, value=addend),))
        after = cast(Load.intern(name, axes, torch.float32), destination.dtype)
        yield Compute(axes, (Store(store.buffer, axes, after),), operation.origin)

    def statistics_in_pieces(self, operation: Reduce) -> list[Compute | Reduce] | None:
        """Mean and squares from those of pieces, which read memory once; None where that is not worth it, or would not
        be as exact."""
        if (near := self.near_piece(operation)) is not None:
            return list(self.welford_in_pieces(operation, *near))
        if (images := self.whole_pieces(operation)) is not None:
            return list(self.welford_of_images(operation, *images))
        (value,), (_mean, squares, _count) = operation.values, operation.destinations
        if squares is None or not sums_exactly(value) or not self.across(operation) or not self.is_few(operation):
            return None
        cut = self.piece(operation)
        if cut is None or not isinstance(cut.along.extent, Number) or cut.along.extent.value % cut.pieces:
            return None
        return list(self.welford_of_columns(operation, cut))

    def whole_pieces(self, operation: Reduce) -> tuple[Axis, list[Axis]] | None:
        """Of a reduction over images, some sizes of which are not known: the axis that counts them, and those of one,
        where the cache holds one and there is enough to do in it."""
        if len(operation.reduced) < 2 or self.across(operation) or self.near_sizes_known(operation):
            return None
        many = likely_points(operation.reduced) >= self.min_split_elements
        if not many or likely_points(operation.axes) >= self.max_split_results:
            return None
        images, *inside = self.slowest_first(operation)
        known_to_be_some = images.extent.low is not None and images.extent.low > 0
        if not known_to_be_some or not MIN_IMAGE <= likely_points(inside) <= self.near_elements:
            return None
        return images, inside

    def near_sizes_known(self, operation: Reduce) -> bool:
        return all(isinstance(item.extent, Number) for item in operation.reduced)

    def welford_of_images(self, operation: Reduce, images: Axis, inside: list[Axis]) -> Iterator[Compute | Reduce]:
        """The statistics of each image, then of all: memory is read once, and no image need be like another."""
        means, squares = (self.made(operation, operation.values[0].dtype, (images,)) for _ in range(2))
        reduced = tuple(item for item in operation.reduced if item in inside)
        part = replace(operation, axes=(images, *operation.axes), reduced=reduced, destinations=(means, squares, None))
        yield from self.welford(part)
        yield from self.welford_of_pieces(operation, (images,), means, squares)

    def welford_of_columns(self, operation: Reduce, cut: Cut) -> Iterator[Compute | Reduce]:
        """Of numbers of 16 bits, those of a piece as sums of deviations from its first number, and of their squares.
        That number is one of those whose squares are asked for, so that what is rounded is at most as many units of
        the result as a piece has numbers; of equal numbers, nothing is."""
        outer, inner, values = self.cut_axis(operation, cut)
        parts = (*cut.whole, *outer)
        reduced = tuple(inner if item is cut.along else item for item in operation.reduced if item not in cut.whole)
        part = replace(operation, axes=(*parts, *operation.axes), reduced=reduced, values=values)
        (value,) = values
        first = rewrite_indices(value, dict.fromkeys(reduced, ZERO))
        zero, most = const(0.0, value.dtype), const(MAX_MEASURE, value.dtype)
        first = choose(compare("lt", op("abs", first), most), first, zero)
        away = op("sub", value, first)
        means, inside, total, raw = (self.made(operation, value.dtype, parts) for _ in range(4))
        yield replace(part, kind="sum", values=(away,), destinations=(total,))
        yield replace(part, kind="sum", values=(op("mul", away, away),), destinations=(raw,))
        off = op("div", self.loaded(total), count_value(flat_extent(item.extent for item in reduced), value.dtype))
        too_much = op("mul", self.loaded(total), off)
        # no more than the largest number: of an infinite sum of squares, nothing that is left is none
        too_much = op("minimum", too_much, const(torch.finfo(value.dtype).max, value.dtype))
        squares = op("maximum", op("sub", self.loaded(raw), too_much), zero)
        yield self.compute(part, {means: op("add", first, off), inside: squares})
        yield from self.welford_of_pieces(operation, parts, means, inside)

    def simpler(self, operation: Reduce) -> list[Compute | Reduce]:
        """Two passes where a row is kept, or where pieces are made anyway; else one. Of a row whose length is not
        known, but is likely to be so short, the cache has all when it is gone through again, which takes less than
        states of means and places do."""
        size = whole_elements(operation.reduced)
        if size is None:
            size = seen_elements(operation.reduced)
        kept = size is not None and 2 * size <= self.machine.kept_elements and not self.across(operation)
        if operation.kind == "softmax" and not is_empty(operation) and (kept or self.is_few(operation)):
            return self.softmax(operation)
        if operation.kind == "welford" and (kept or self.is_few(operation)):
            return self.welford(operation)
        if operation.kind in EXTREME_OF and not is_empty(operation) and (kept or self.is_few(operation)):
            return self.first_extreme(operation)
        return [operation]

    def first_extreme(self, operation: Reduce) -> list[Compute | Reduce]:
        """The greatest or least value, then the first place that has it, or is NaN: one that is NaN is both."""
        (value,), (result, place) = operation.values, operation.destinations
        plain = replace(operation, kind=EXTREME_OF[operation.kind])
        exact = result is not None and self.buffers[result.buffer].dtype == value.dtype
        extreme = result if result is not None and exact else self.made(operation, value.dtype)
        steps: list[Compute | Reduce] = [replace(plain, destinations=(extreme,))]
        if result is not None and not exact:
            steps.append(self.compute(operation, {result: self.loaded(extreme)}))
        if place is not None:
            where = flat_place(operation.reduced, [item.extent for item in operation.reduced])
            dtype = torch.int32 if where.high is not None and where.high < 1 << 31 else torch.int64
            is_there: Expr = compare("eq", value, self.loaded(extreme))
            if value.dtype.is_floating_point:
                is_there = either(is_there, op("isnan", value, dtype=torch.bool))
            first = choose(is_there, index_value(where, dtype), const(torch.iinfo(dtype).max, dtype))
            steps.append(replace(operation, kind="amin", values=(first,), destinations=(place,)))
        return steps

    # --- pieces -------------------------------------------------------------------------------------------------------

    def programs(self, operation: Reduce) -> int:
        """How many there would be, were nothing cut."""
        results = likely_points(operation.axes)
        return results * self.itemsize(operation) // self.machine.line_bytes if self.across(operation) else results

    def itemsize(self, operation: Reduce) -> int:
        loads = [item.dtype.itemsize for item in nodes_of(*operation.values) if isinstance(item, Load)]
        return max(min(loads, default=4), 2)

    def is_few(self, operation: Reduce) -> bool:
        """Whether a few programs would have so much to do each that another kernel, which shares it, costs less."""
        programs = max(self.programs(operation), 1)
        each = likely_points(operation.reduced) * likely_points(operation.axes) // programs
        return programs < self.max_split_results and each >= self.machine.one_program_elements

    def split(self, operation: Reduce) -> Iterator[Reduce]:
        if is_product(operation):
            cut = self.piece_of_product(operation)
        else:
            cut = self.piece(operation) if operation.kind in SPLIT_KINDS and self.is_few(operation) else None
        if cut is None:
            yield operation
            return
        (destination,) = operation.destinations
        assert destination is not None
        outer, inner, values = self.cut_axis(operation, cut)
        parts = (*cut.whole, *outer)
        partial = self.made(operation, self.state_type(operation), parts)
        is_slowest = self.across(operation) or is_product(operation)
        axes = (*parts, *operation.axes) if is_slowest else (*operation.axes, *parts)  # as memory lies
        reduced = tuple(inner if item is cut.along else item for item in operation.reduced if item not in cut.whole)
        yield replace(operation, axes=axes, reduced=reduced, values=values, destinations=(partial,))
        yield replace(operation, reduced=parts, values=(self.loaded(partial),), destinations=(destination,))

    def piece_of_product(self, operation: Reduce) -> Cut | None:
        """Equal parts of what is added up, where a configuration asks for some."""
        pieces = config_for(problem_of(operation, self.buffer_table), self.machine, self.tuned).pieces
        return Cut((), operation.reduced[0], pieces) if pieces > 1 else None

    # --- rows and columns of one tensor -------------------------------------------------------------------------------

    def with_row_pieces(self, operations: list[Operation]) -> list[Operation]:
        """Column reductions in pieces, and what goes along the same rows in the same pieces: see `row_pieces`."""
        new: dict[int, list[Operation]] = {}
        for place, operation in enumerate(operations):
            if place in new or not isinstance(operation, Reduce) or not self.is_column_reduction(operation):
                continue
            shared = self.shared_rows(operation, operations)
            if shared is None or not new.keys().isdisjoint(shared[1]):
                continue
            cut, cut_axes = shared
            for other, along in cut_axes.items():
                each = operations[other]
                if isinstance(each, Reduce) and along in each.reduced:
                    new[other] = list(self.columns_in_pieces(each, along, cut.pieces))
                elif isinstance(along.extent, Number):  # else see `unknown_rows`
                    new[other] = [in_pieces(each, along, cut.pieces)]
        return [each for place, operation in enumerate(operations) for each in new.get(place, [operation])]

    def is_column_reduction(self, operation: Reduce) -> bool:
        if operation.kind not in STORE_MODES or not operation.reduced or not self.is_here(operation):
            return False
        columns = likely_points(operation.axes)
        many = columns * likely_points(operation.reduced) >= self.machine.shared_elements
        is_wide = columns >= self.machine.min_kept_columns
        return many and is_wide and len(operation.axes) == 1 and self.across(operation)

    def shared_rows(self, seed: Reduce, operations: list[Operation]) -> tuple[Cut, dict[int, Axis]] | None:
        """How to cut, and which operations, by their places, along which of their axes; None where nothing but columns
        is reduced."""
        reduced = self.slowest_first(seed)
        cut_axes = related(seed, reduced[-1], operations, self.buffer_table)
        sizes = sorted(likely(item.extent) for item in reduced)
        for place, along in list(cut_axes.items()):
            each = operations[place]
            if isinstance(each, Reduce) and along in each.reduced:
                alike = sorted(likely(item.extent) for item in each.reduced) == sizes
                if not alike or not self.is_column_reduction(each):
                    del cut_axes[place]
        by_row = [operations[place] for place, along in cut_axes.items() if not is_reduced(operations[place], along)]
        large = [each for each in by_row if likely_points(axes_of(each)) >= self.machine.shared_elements]
        if not large:
            return None
        if likely_points(seed.axes) > self.machine.kept_elements // 4:
            return None
        cut = cut_of(reduced, self.machine.row_programs, self.machine.min_piece_rows) or self.cut_of_unknown(seed)
        return None if cut is None else (cut, cut_axes)

    def cut_of_unknown(self, seed: Reduce) -> Cut | None:
        """Pieces of rows that need not be equal, where columns, or as many as were seen, fit into registers."""
        along, *others = seed.reduced
        columns = whole_elements(seed.axes) or seen_elements(seed.axes)
        if others or isinstance(along.extent, Number) or columns is None:
            return None
        pieces = min(self.machine.row_programs, power_below(likely(along.extent) // self.machine.min_piece_rows))
        return Cut((), along, pieces) if pieces >= self.machine.multiprocessors else None

    def columns_in_pieces(self, operation: Reduce, along: Axis, pieces: int) -> Iterator[Reduce]:
        """A column reduction over the rows of each piece, then over the pieces."""
        (destination,) = operation.destinations
        assert destination is not None
        if not isinstance(along.extent, Number):
            outer, inner, values = self.cut_axis(operation, Cut((), along, pieces))
            partial = self.made(operation, self.state_type(operation), outer)
            part = replace(
                operation, axes=(*outer, *operation.axes), reduced=(inner,), values=values, destinations=(partial,)
            )
            final = replace(operation, reduced=outer, values=(self.loaded(partial),), destinations=(destination,))
            self.cut_already += [part, final]
            yield from (part, final)
            return
        cut = in_pieces(operation, along, pieces)
        assert isinstance(cut, Reduce)
        rest = along if pieces == 1 else [item for item in cut.reduced if item not in operation.reduced][-1]
        outer = tuple(item for item in cut.reduced if item is not rest)
        partial = self.made(operation, self.state_type(operation), outer)
        yield replace(cut, axes=(*outer, *operation.axes), reduced=(rest,), destinations=(partial,))
        final = replace(operation, reduced=outer, values=(self.loaded(partial),), destinations=(destination,))
        self.cut_already.append(final)
        yield final

    def slowest_first(self, operation: Reduce) -> list[Axis]:
        places = [access.place for access in self.buffer_table.accesses(operation) if not access.writes]

        def reach(item: Axis) -> int:
            steps = [step_of(place, item) for place in places]
            return max((abs(likely(step, 1 << 30)) for step in steps if step is not None), default=0)

        return sorted(operation.reduced, key=reach, reverse=True)

    def piece(self, operation: Reduce) -> Cut | None:
        """How to share what is reduced: by the slowest axis that is long enough, else by several."""
        programs = max(self.programs(operation), 1)
        work = likely_points(operation.reduced) * likely_points(operation.axes) // programs
        wanted = power_below(self.machine.pieces(programs, work))
        slowest_first = self.slowest_first(operation)
        enough = [item for item in slowest_first if likely(item.extent) >= 2 * wanted]
        if not enough and (cut := by_several(slowest_first, wanted)) is not None:
            return cut
        longest = max(slowest_first, key=lambda item: likely(item.extent))
        wanted = min(wanted, likely(longest.extent) // 2)
        if wanted < 2:
            return None
        chosen = enough[0] if enough else longest
        if isinstance(chosen.extent, Number):
            wanted = equal_pieces(chosen.extent.value, wanted)
        return Cut((), chosen, wanted)

    def cut_axis(self, operation: Reduce, cut: Cut) -> tuple[tuple[Axis, ...], Axis, tuple[Expr, ...]]:
        """An axis as pieces, the places in one, and the values over both: beyond the end they change no result."""
        along, pieces = cut.along, cut.pieces
        if pieces == 1:
            return (), along, operation.values
        size = (along.extent + (pieces - 1)) // pieces
        outer, inner = axis(f"{along.name}_piece", pieces), axis(f"{along.name}_rest", size)
        place: Index = outer * size + inner
        values = tuple(rewrite_indices(item, {along: place}) for item in operation.values)
        if along.extent is not size * pieces:
            inside = compare("lt", index_value(place), index_value(along.extent))
            values = tuple(masked(inside, value, neutral_value(operation.kind, value.dtype)) for value in values)
        return (outer,), inner, values


def seen_elements(axes: Sequence[Axis]) -> int | None:
    """Elements of a block that would hold axes of the sizes that were seen; None where nothing was."""
    sizes = [atom for item in axes for atom in item.extent.atoms if isinstance(atom, Symbol)]
    return power_above(likely_points(axes)) if sizes and all(size.likely is not None for size in sizes) else None


def by_several(slowest_first: Sequence[Axis], wanted: int) -> Cut | None:
    """About so many pieces: all values of the slowest axes, and parts of the next. None where sizes are not known, or
    where that is not half as many."""
    if not all(isinstance(item.extent, Number) for item in slowest_first):
        return None
    count = 1
    for place, item in enumerate(slowest_first):
        length = likely(item.extent)
        pieces = max(min(wanted // count, length // 2), 1)
        if place and count * pieces >= max(wanted // 2, 2):
            return Cut(tuple(slowest_first[:place]), item, equal_pieces(length, pieces))
        count *= length
    return None


def equal_pieces(extent: int, wanted: int) -> int:
    """About so many pieces; a number that divides the extent, if one is near."""
    near = [count for count in range(wanted, 2 * wanted) if extent % count == 0]
    near += [count for count in range(wanted, wanted // 2, -1) if extent % count == 0]
    return near[0] if near else wanted
