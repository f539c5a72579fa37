"""Statements of a kernel as lines of Triton source.

One program has one block: every independent loop around a statement is a dimension of it, with a mask where the extent
is no multiple. Loops in order are loops in the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ferrite.codegen.triton.attention import print_attention
from ferrite.codegen.triton.barriers import Barriers
from ferrite.codegen.triton.descriptors import described
from ferrite.codegen.triton.divisibility import even_products, partly_even
from ferrite.codegen.triton.grid import MAX_BLOCK_ELEMENTS, Spread, block_limit, spread_loops
from ferrite.codegen.triton.grouped import print_choice
from ferrite.codegen.triton.indices import INDEX, WIDE, Reaches, is_narrow, widened
from ferrite.codegen.triton.interleaved_loads import pairs_in
from ferrite.codegen.triton.launch import DESCRIPTORS, EVEN, EVEN_ELEMENTS, NARROW, Block, power_of_two
from ferrite.codegen.triton.module import INDENT, BlockAxis, Mask, Module, Scope, Tile, Value
from ferrite.codegen.triton.operators import filled, is_at_least_one, is_product, type_name
from ferrite.codegen.triton.products import BlockProduct, block_product, factor
from ferrite.codegen.triton.rounding import all_are_rounded, exact_values, powers_beside_one
from ferrite.codegen.triton.states import Accumulators
from ferrite.codegen.triton.stores import Stores
from ferrite.codegen.triton.values import Evaluation
from ferrite.errors import NotGenerated
from ferrite.graph import HALVES
from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Expr,
    Index,
    IndexValue,
    Load,
    Number,
    Random,
    Sum,
    Symbol,
    indices_of,
    number,
    symbol,
    symbols_in,
)
from ferrite.ir.kernel import (
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    Notes,
    Prefetch,
    Scratch,
    Statement,
    Store,
    Update,
    When,
    checks,
    indices_in,
    nodes_in,
    walk,
)

# Lanes side by side that a mask may tell apart where their number is no multiple of this: then none are loaded at once.
MASKED_ELEMENTS = 16
MAX_WRITTEN_TWICE = 200  # values
# No size of a kernel has such a name.
PROGRAM, ROW_BLOCK, COLUMN_BLOCK = (
    symbol(name, 0, (1 << 31) - 1) for name in ("program id", "block of rows", "block of columns")
)


class Printer:
    """`notes`: lines say in a comment what they come from."""

    def __init__(self, kernel: Kernel, name: str, notes: Notes | None = None) -> None:
        self.module = Module(checks=tuple(checks(kernel)), quick=all_are_rounded(kernel), exact=exact_values(kernel))
        self.module.notes = notes
        self.module.beside_one = powers_beside_one(kernel)
        self.module.names.add(name)
        self.module.once = frozenset(item.name for item in kernel.pointers if item.once)
        self.module.last_readers = {item.name: last_reader(item.name, kernel) for item in kernel.pointers if item.again}
        self.states = Accumulators(self.module)
        self.barriers = Barriers(kernel)
        self.types = {item.name: item.dtype for item in kernel.pointers}
        self.stated = kernel.warps > 0  # the kernel says what its blocks are
        self.grouped = bool(kernel.problems)
        self.module.drawn = drawn_symbols(kernel)
        self.stores = Stores(self.module, kernel)

    # --- the grid -----------------------------------------------------------------------------------------------------

    def kernel(self, kernel: Kernel) -> Index:
        """Prints the body; the number of programs, of one problem where there are several."""
        module = self.module
        for pointer in kernel.pointers:
            type_name(pointer.dtype)
            module.pointers[pointer.name] = module.fresh(pointer.name)
        if not all(map(is_narrow, kernel.sizes)) and self.stated and not kernel.problems:
            module.index_type = INDEX
            self.index_type = module.slot()
        for size in () if kernel.problems else kernel.sizes:
            name, wide = module.fresh(size.name), not is_narrow(size)
            module.atoms[size] = Value(name), wide
            if size in module.drawn:
                module.line(f"{name} = {widened(name)}")
            elif wide:
                module.line(f"{name} = {module.widened(name)}")
        if module.index_type == INDEX:
            self.tell_what_is_even(kernel)
        loops, body = spread_loops(kernel)
        blocks = [self.block_of(item.loop.axis.extent, item.most) if item.most > 1 else None for item in loops]
        counts = [_count(item.loop.axis.extent, block) for item, block in zip(loops, blocks, strict=True)]
        module.atoms |= {block.symbol: (Value(block.name), False) for block in module.blocks.values()}
        if kernel.problems:
            module.atoms[PROGRAM] = Value(print_choice(kernel, module)), False
        if ZERO in counts:
            module.line("pass")
            return ZERO
        module.atoms[PROGRAM] = module.atoms.get(PROGRAM, (Value("pid"), False))
        total = math.prod(counts, start=ONE)
        if kernel.resident and isinstance(total, Number):
            return self.resident_programs(min(kernel.resident, total.value), total.value, loops, blocks, counts, body)
        if loops and not kernel.problems:
            module.line("pid = tl.program_id(0)")
        self.one_program(loops, blocks, counts, body)
        if not module.lines:
            module.line("pass")
        return total

    def tell_what_is_even(self, kernel: Kernel) -> None:
        """Sizes and products of them that vectors want to be multiples, with a constant for each that says whether."""
        module = self.module
        for size, power in partly_even(kernel):
            name = module.atoms[size][0].text
            with module.indented(f"if {EVEN}{len(module.even)}:"):
                module.line(f"{name} = tl.multiple_of({name}, {power})")
            module.even.append(size * (EVEN_ELEMENTS // power))
        for product in even_products(kernel):
            name = module.set("even", Evaluation(module, Scope()).index(product)[0].text)
            with module.indented(f"if {EVEN}{len(module.even)}:"):
                module.line(f"{name} = tl.multiple_of({name}, {EVEN_ELEMENTS})")
            module.even.append(product)
            module.named[product.factors] = name

    def promises(self, kernel: Kernel) -> tuple[tuple[str, Index], ...]:
        """What the host has to see to, as names of constants and numbers that are multiples of 16 where it holds."""
        beyond = self.print_index_type(kernel)
        even = tuple((f"{EVEN}{place}", each) for place, each in enumerate(self.module.even))
        return (*even, (NARROW, beyond)) if beyond is not ZERO else even

    def print_index_type(self, kernel: Kernel) -> Index:
        """At the beginning, once all indices are printed: the type of those that sizes decide about. Gives 1 where one
        of them leaves 32 bits, over the sizes: 0 where none can."""
        module = self.module
        if module.index_type != INDEX:
            return ZERO
        reaches = Reaches(frozenset(kernel.sizes))
        for index in module.wide_indices:
            reaches.add(index)
        beyond = reaches.is_beyond
        known: dict[Index, str] = {ZERO: "tl.int32", ONE: WIDE}
        chosen = known.get(beyond, f"tl.int32 if {NARROW} else {WIDE}")
        self.index_type.append(f"{INDENT}{INDEX}: tl.constexpr = {chosen}")
        return ZERO if isinstance(beyond, Number) else beyond

    def one_program(
        self, loops: list[Spread], blocks: list[Block | None], counts: list[Index], body: tuple[Statement, ...]
    ) -> None:
        scope = Scope()
        if self.stated and loops and loops[-1].most > 1 and all(isinstance(item, Let | Store) for item in body):
            self.module.pairs = pairs_in(body, loops[-1].loop.axis)
        places = self.places(loops, counts)
        for item, block, at in zip(loops, blocks, places, strict=True):
            scope = self.spread(item, block, at, scope)
        is_whole = None if self.grouped or len(loops) != 1 else self.whole_block(loops[0], body, scope)
        if is_whole is None:
            self.block(body, scope)
            return
        with self.module.indented(f"if {is_whole}:"):
            self.block(body, replace(scope, masks=()))
        self.barriers.clear()
        with self.module.indented("else:"):
            self.block(body, scope)

    def whole_block(self, item: Spread, body: tuple[Statement, ...], scope: Scope) -> str | None:
        """Whether all lanes of a flat block count, as a condition: so it is in all programs but the last, and without a
        mask they load and store vectors. None where masks are no hindrance, or where there is much to be written twice.
        """
        extent = item.loop.axis.extent
        bounds = [mask.bounds for mask in scope.masks]
        if not self.stated or bounds != [0] or extent % number(MASKED_ELEMENTS) is ZERO:
            return None
        flat = all(isinstance(statement, Let | Store) for statement in body)
        if not flat or sum(len(nodes_in(statement)) for statement in body) > MAX_WRITTEN_TWICE:
            return None
        evaluation = Evaluation(self.module, Scope())
        base = self.module.bases[item.loop.axis]
        limit, _ = evaluation.index(extent)
        return f"{base} + {item.most} <= {limit.text}"

    def resident_programs(self, programs: int, total: int, *grid: Any) -> Index:
        """Programs that go through all blocks, as far as there are programs for them."""
        module = self.module
        module.describes = True
        made = module.slot()
        with module.indented(f"for pid in tl.range(tl.program_id(0), {total}, {programs}, flatten=True):"):
            self.one_program(*grid)
        if module.descriptors:
            made.append(f"{INDENT}if {DESCRIPTORS}:")
            made += [f"{INDENT * 2}{name} = {text}" for text, name in module.descriptors.items()]
        return number(programs)

    def places(self, loops: list[Spread], counts: list[Index]) -> list[Index]:
        """Which iteration or block of each loop a program has."""
        after: Index = ONE
        places: list[Index] = []
        for place, count in reversed(list(enumerate(counts))):
            at = PROGRAM // after
            places.insert(0, at if place == 0 else at % count)
            after = after * count
        if loops and any(isinstance(each, Attend) and each.begins_at_end for each in loops[-1].loop.body):
            places[-1] = counts[-1] - 1 - places[-1]
        if self.stated and len(loops) > 1 and loops[-2].loop.kind == "vector" and loops[-2].loop.copies > 1:
            places[-2:] = self.neighbours(loops[-2].loop.copies, counts[-2], counts[-1], len(loops) == 2)
        return places

    def neighbours(self, high: int, rows: Index, columns: Index, is_all: bool) -> list[Index]:
        """The block of rows and that of columns, where programs go through so many blocks of rows for each of columns:
        those that run at one time read less in all. The last blocks of rows may be fewer."""
        module, evaluation = self.module, Evaluation(self.module, Scope())
        at = module.set("at", evaluation.index(PROGRAM if is_all else PROGRAM % (rows * columns))[0].text)
        of_all = module.set("of_all", evaluation.index(columns * high)[0].text)
        first = module.set("first", f"{at} // {of_all} * {high}")
        some = module.set("some", f"tl.minimum({evaluation.index(rows)[0].text} - {first}, {high})")
        inside = module.set("inside", f"{at} % {of_all}")
        module.atoms[ROW_BLOCK] = Value(module.set("row_block", f"{first} + {inside} % {some}")), False
        module.atoms[COLUMN_BLOCK] = Value(module.set("column_block", f"{inside} // {some}")), False
        return [ROW_BLOCK, COLUMN_BLOCK]

    def spread(self, item: Spread, block: Block | None, at: Index, scope: Scope) -> Scope:
        """One loop of the grid; `at` counts its iterations or blocks."""
        self.block(item.before, scope)
        axis = item.loop.axis
        if block is None:
            self.number(axis, self.counted(at, axis, scope))
            return scope
        if self.stated and _holds(block.most, axis.extent):
            return self.lanes(axis, block, "", scope, whole=True, empty=False)
        start = self.counted(at, axis, scope)
        base = start if is_narrow(axis) else self.module.widened(start)
        return self.lanes(axis, block, f"({base}) * {block.name}", scope, whole=False)

    def counted(self, at: Index, axis: Axis, scope: Scope) -> str:
        """Which iteration or block a program has. What counts programs fits, since there are no more than fit."""
        before = dict(self.module.wide_indices)
        text, _ = Evaluation(self.module, scope).index(at)
        self.module.wide_indices = before if is_narrow(axis) else {**before, axis: None}
        return text.text

    def block_of(self, extent: Index, most: int) -> Block:
        return self.module.fixed(most) if self.stated else self.module.block(extent, most)

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, body: tuple[Statement, ...], scope: Scope) -> None:
        for statement in body:
            if self.barriers.before(statement):
                self.module.line("tl.debug_barrier()")
            if self.module.notes is None:
                self.statement(statement, scope)
                continue
            before = self.module.note
            self.module.note = self.module.notes.statement(statement) or before
            self.statement(statement, scope)
            self.module.note = before

    def statement(self, statement: Statement, scope: Scope) -> None:
        match statement:
            case Loop():
                self.loop(statement, scope)
            case Scratch():
                self.scratch(statement, scope)
            case Let(name=name):
                value = Evaluation(self.module, scope).value(statement.value)
                self.module.name_value(name, Value(self.module.set(name, value.text), value.dims))
                if is_at_least_one(statement.value, self.module.at_least_one):
                    self.module.at_least_one.add(name)
                if is_product(statement.value, self.module.products):
                    self.module.products.add(name)
            case Accumulate():
                self.states.begin(statement, scope)
                self.block(statement.body, scope)
                self.states.end(statement)
            case Update():
                self.states.update(statement, scope)
            case Store():
                self.stores.store(statement, scope)
            case When():
                self.when(statement, scope)
            case Attend():
                print_attention(self, statement, scope)
            case Prefetch():
                pass  # so many programs run at once that memory is never waited for alone

    def when(self, statement: When, scope: Scope) -> None:
        evaluation = Evaluation(self.module, scope)
        condition = evaluation.value(statement.condition)
        if condition.dims:
            self.block(statement.body, replace(scope, masks=evaluation.under(condition, scope.masks)))
            return
        with self.barriers.perhaps(), self.module.indented(f"if {condition.text}:"):
            self.block(statement.body, scope)

    # --- loops --------------------------------------------------------------------------------------------------------

    def loop(self, loop: Loop, scope: Scope) -> None:
        self.module.loops.append(loop)
        if loop.axis.extent is ONE:
            self.number(loop.axis, "0")
            self.block(loop.body, scope)
        elif loop.kind in ("serial", "unrolled"):
            self.in_order(loop, scope)
        else:
            self.blocks(loop, scope)
        self.module.loops.pop()

    def in_order(self, loop: Loop, scope: Scope) -> None:
        if loop.kind == "unrolled":
            name = self.module.fresh(loop.axis.name)
            with self.iterations(f"for {name} in tl.static_range({loop.axis.extent}):", loop):
                self.number(loop.axis, name)
                self.block(loop.body, scope)
            return
        stop, ragged = self.stop(loop.axis, scope)
        name = self.module.fresh(loop.axis.name)
        under_way = f", num_stages={loop.copies}" if self.stated and loop.copies > 1 else ""
        head = f"tl.range(0, {stop}{under_way})" if under_way else f"range(0, {stop})"
        with self.iterations(f"for {name} in {head}:", loop):
            self.number(loop.axis, name)
            self.block(loop.body, self.shortened(loop.axis, scope) if ragged else scope)

    def blocks(self, loop: Loop, scope: Scope) -> None:
        """Independent iterations: one block of them, or a loop over blocks, or, where no room is left, a loop."""
        axis, room = loop.axis, max(MAX_BLOCK_ELEMENTS // scope.elements, 1)
        product = block_product(loop, scope, self.module.tiles) if self.stated else None
        if product is not None and self.states.is_sum_of(product.state, scope):
            self.product(product, loop, scope)
            return
        if self.stated:
            most, whole = loop.lanes, _holds(loop.lanes, axis.extent)
        else:
            whole = axis.extent.high is not None and power_of_two(axis.extent.high) <= room
            most = power_of_two(axis.extent.high or 1) if whole else min(room, block_limit(loop))
        in_order = loop.kind in ("scan", "sort")
        if in_order and not self.stated:
            raise NotGenerated(f"a {loop.kind} without blocks")
        scan = len(scope.axes) if in_order else None
        if whole:
            block = self.block_of(axis.extent, most)
            within = replace(self.lanes(axis, block, "", scope, whole=True), scan=scan, sorts=loop.kind == "sort")
            self.block(loop.body, within)
            return
        stop, ragged = self.stop(axis, scope)
        if most == 1:
            name = self.module.fresh(axis.name)
            with self.iterations(f"for {name} in range(0, {stop}):", loop):
                self.number(axis, name)
                self.block(loop.body, self.shortened(axis, scope) if ragged else scope)
            return
        block = self.block_of(axis.extent, most)
        with self.steps(loop, stop, block) as base:
            self.block(loop.body, replace(self.lanes(axis, block, base, scope, whole=False), scan=scan))

    @contextmanager
    def steps(self, loop: Loop, stop: str, block: Block) -> Iterator[str]:
        """A loop over the blocks of an axis; where each begins."""
        start = self.module.fresh(f"{loop.axis.name}_start")
        if loop in self.module.last_readers.values() and loop.kind == "vector":
            # backwards: what the loop before has read last is in the cache most likely
            done = self.module.fresh("done")
            with self.iterations(f"for {done} in range(0, {stop}, {block.name}):", loop):
                self.module.line(f"{start} = ({stop} - 1) // {block.name} * {block.name} - {done}")
                yield start if is_narrow(loop.axis) else self.module.widened(start)
            return
        head = f"range(0, {stop}, {block.name})"
        if self.stated and loop.copies > 1:
            head = f"tl.range(0, {stop}, {block.name}, num_stages={loop.copies})"
        with self.iterations(f"for {start} in {head}:", loop):
            yield start if is_narrow(loop.axis) else self.module.widened(start)

    def product(self, product: BlockProduct, loop: Loop, scope: Scope) -> None:
        """What a loop adds up, by blocks of the two factors."""
        found = self.states.started(product.state)
        block = self.block_of(loop.axis.extent, loop.lanes)
        rows, columns = scope.axes
        whole = _holds(loop.lanes, loop.axis.extent)

        def multiplied(base: str) -> None:
            if self.barriers.before(loop.body[0]):
                self.module.line("tl.debug_barrier()")
            of_rows, of_columns = (tuple(mask for mask in scope.masks if mask.bounds == dim) for dim in range(2))
            within = self.lanes(loop.axis, block, base, Scope((rows,), of_rows), whole)
            left = self.factor(product.left, within, summed=1)
            within = self.lanes(loop.axis, block, base, Scope(), whole)
            within = Scope((*within.axes, columns), (*within.masks, *of_columns))
            right = self.factor(product.right, within, summed=0)
            function = "multiply_add" if product.left.dtype in HALVES else "add_product"
            self.module.needs(function)
            (total,) = found.texts
            self.module.line(f"{total} = {function}({left}, {right}, {total})")

        if whole:
            multiplied("")
            return
        with self.steps(loop, self.stop(loop.axis, scope)[0], block) as base:
            multiplied(base)

    def factor(self, value: Expr, scope: Scope, summed: int) -> str:
        """A block of a factor: by a descriptor, where there may be one, or by pointers."""
        module, by = self.module, described(self.module, value, scope)
        if by is None:
            return factor(module, value, scope, summed)
        name = module.fresh("factor")
        with module.indented(f"if {DESCRIPTORS}:"):
            module.line(f"{name} = {by.text}")
        with module.indented("else:"):
            module.line(f"{name} = {factor(module, value, scope, summed)}")
        return name

    @contextmanager
    def iterations(self, head: str, loop: Loop) -> Iterator[None]:
        stored = {item.buffer for item in walk(loop.body) if isinstance(item, Store)}
        if self.states.are_read():
            self.module.known.clear()
        else:
            self.module.known.forget(stored)
        with self.barriers.perhaps(), self.module.indented(head):
            in_order = loop.kind in ("serial", "unrolled")
            if in_order and self.barriers.between_iterations(loop):
                self.module.line("tl.debug_barrier()")
            yield

    def stop(self, axis: Axis, scope: Scope) -> tuple[str, bool]:
        """Where a loop stops, and whether some lanes stop earlier: then it goes on as long as any may."""
        extent, _ = Evaluation(self.module, scope).index(axis.extent)
        if not extent.dims:
            return extent.text, False
        if axis.extent.high is None:
            raise NotGenerated(f"a loop of {axis.extent} iterations: every lane has another number, without bound")
        return str(axis.extent.high), True

    def number(self, axis: Axis, text: str) -> None:
        """An axis that is one number at a time."""
        wide = not is_narrow(axis)
        text = self.module.widened(text) if wide else text
        name = text if text.isidentifier() or text.isdigit() else self.module.set(axis.name, text)
        self.module.bind(axis, Value(name), wide)

    def shortened(self, axis: Axis, scope: Scope) -> Scope:
        """Only the lanes whose own number of iterations is not over."""
        evaluation = Evaluation(self.module, scope)
        extent, _ = evaluation.index(axis.extent)
        going = Value(self.module.set("mask", f"{self.module.atoms[axis][0].text} < {extent.text}"), extent.dims)
        return replace(scope, masks=evaluation.under(going, scope.masks))

    def lanes(self, axis: Axis, block: Block, base: str, scope: Scope, whole: bool, empty: bool | None = None) -> Scope:
        """One dimension more: lanes from `base` on, those beyond the extent masked. `empty`: whether no lane may be
        inside, where that is known."""
        dim = len(scope.axes)
        key = ("lanes", axis, block, dim, scope.masks) if whole else None
        again: Scope | None = self.module.known.get(key) if key else None
        if again is not None:
            return replace(again, axes=(*scope.axes, BlockAxis(axis, block, whole)))
        inner = self.new_lanes(axis, block, base, scope, whole, empty)
        if key:
            self.module.known.set(key, inner)
        return inner

    def new_lanes(self, axis: Axis, block: Block, base: str, scope: Scope, whole: bool, empty: bool | None) -> Scope:
        dim = len(scope.axes)
        added = "[" + "None, " * dim + ":]" if dim else ""
        lanes = f"tl.arange(0, {block.name}){added}"
        wide = not is_narrow(axis)
        text = f"{base} + {lanes}" if base else (self.module.widened(lanes) if wide else lanes)
        value = Value(self.module.set(axis.name, text), frozenset([dim]))
        self.module.bind(axis, value, wide)
        self.module.bases[axis] = base
        inner = replace(scope, axes=(*scope.axes, BlockAxis(axis, block, whole)))
        extent = axis.extent
        if whole and extent.low == extent.high == block.most:
            return inner
        if empty is None:
            empty = whole and (extent.low is None or extent.low < 1)
        if self.stated and not empty and extent % number(block.most) is ZERO and not extent_depends(extent):
            return inner
        limit, _ = Evaluation(self.module, inner).index(extent)
        dims = value.dims | limit.dims
        mask = Value(self.module.set("mask", f"{value.text} < {limit.at(dim + 1)}"), dims)
        surely = not empty and not limit.dims
        if surely:
            return replace(inner, masks=(*scope.masks, Mask(mask, bounds=dim)))
        both = Evaluation(self.module, inner).under(mask, scope.masks)
        return replace(inner, masks=both)

    # --- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, statement: Scratch, scope: Scope) -> None:
        blocks: list[Block | None] = []
        elements = scope.elements
        for size in statement.sizes:
            most = power_of_two(size.high or 1)
            elements *= most
            blocks.append(None if size is ONE else self.block_of(size, most))
        if elements > MAX_BLOCK_ELEMENTS and not self.stated:
            raise NotGenerated(f"{elements} elements of scratch memory; a block has {MAX_BLOCK_ELEMENTS} at most")
        names = [axis.block.name for axis in scope.axes] + [block.name for block in blocks if block is not None]
        text = self.module.set(statement.name, filled(0, statement.dtype, f"[{', '.join(names)}]"))
        self.module.known.forget([statement.name])
        self.module.tiles[statement.name] = Tile(text, statement.dtype, len(scope.axes), tuple(blocks))


def drawn_symbols(kernel: Kernel) -> frozenset[Symbol]:
    """Where draws begin: what no place in memory has to do with, and what no 32 bits need hold."""
    drawn: set[Symbol] = set()
    others: set[Symbol] = set()
    for statement in walk(kernel.body):
        for item in nodes_in(statement):
            if isinstance(item, Random):
                terms = item.counter.terms if isinstance(item.counter, Sum) else ()
                drawn.update(
                    each for each in (*item.seed.atoms, *(term for term, _ in terms)) if isinstance(each, Symbol)
                )
            elif not isinstance(item, IndexValue):
                others |= {each for index in indices_of(item) for each in symbols_in(index)}
        others |= {each for index in indices_in(statement) for each in symbols_in(index)}
    return frozenset(drawn - others)


def last_reader(name: str, kernel: Kernel) -> Loop:
    """The last loop that directly reads what is behind a pointer."""
    loops = [item for item in walk(kernel.body) if isinstance(item, Loop)]
    reads = [loop for loop in loops if any(name in loads_of(statement) for statement in loop.body)]
    return reads[-1]


def loads_of(statement: Statement) -> set[str]:
    return {item.buffer for item in nodes_in(statement) if isinstance(item, Load)}


def _count(extent: Index, block: Block | None) -> Index:
    """Iterations of a loop of the grid: one for each element, or for each block."""
    if block is None:
        return extent
    size = number(block.most) if block.name.isdigit() else block.symbol
    return (extent + size - 1) // size


def _holds(lanes: int, extent: Index) -> bool:
    return extent.high is not None and lanes >= extent.high


def extent_depends(extent: Index) -> bool:
    """Whether an extent is another one for other iterations of a loop around."""
    return not all(isinstance(atom, Symbol) for atom in extent.atoms)
