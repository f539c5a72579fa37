"""Statements: loops and what is in them.

A loop over lanes is written up to three times: for whole steps, for whole vectors, and for what is left. Where the
extent is a number, what is left is a narrower vector. Where it is not, lanes beyond the end repeat the last one that
counts: they read and write what that one does, and update no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ferrite.codegen.llvm.accumulators import Accumulators
from ferrite.codegen.llvm.checks import stop_without_tiles
from ferrite.codegen.llvm.emission import AddressBounds, AxisValue, Emission, Memory, Value
from ferrite.codegen.llvm.expressions import Expressions
from ferrite.codegen.llvm.types import BYTES, MEMORY, vector
from ferrite.ir import ZERO, Axis, Index, Local, Number, data_of, nodes_of, number
from ferrite.ir.kernel import Accumulate, Let, Loop, Notes, Prefetch, Scratch, Statement, Store, Update, When, walk

MAX_STACK_BYTES = 64 * 1024  # bytes of scratch that a function may have on its stack
Body = Sequence[Statement]


class Statements:
    def __init__(self, emission: Emission, expressions: Expressions) -> None:
        self.e, self.expressions = emission, expressions
        self.accumulators = Accumulators(emission, expressions)
        self.parallel: Callable[[Loop], None] = self.serial
        self.notes: Notes | None = None  # where lines are to say what they come from

    def block(self, body: Body) -> None:
        for statement in body:
            if self.notes is None:
                self.statement(statement)
                continue
            function = self.e.function
            before, function.note = function.note, self.notes.statement(statement)
            self.statement(statement)
            function.note = before

    def statement(self, statement: Statement) -> None:
        match statement:
            case Loop():
                self.loop(statement)
            case Scratch():
                self.scratch(statement)
            case Let(name=name, value=value):
                (self.e.names[name],) = self.expressions.values(value)
            case Accumulate(states=states):
                for state in states:
                    self.accumulators.begin(state)
                self.block(statement.body)
                for state in states:
                    self.accumulators.end(state)
            case Update():
                self.accumulators.update(statement)
            case Store(value=value):
                (made,) = self.expressions.values(value)
                self.expressions.access.store(statement, made, value.dtype)
            case When():
                self.when(statement)
            case Prefetch():
                self.expressions.access.prefetch(statement)

    def when(self, statement: When) -> None:
        (condition,) = self.expressions.values(statement.condition)
        if condition.lanes == 1 and len(condition.parts) == 1:
            with self.e.branch(condition.parts[0]):
                self.block(statement.body)
            return
        kept = self.e.mask
        self.e.mask = condition if kept is None else self.expressions.both(kept, condition)
        self.block(statement.body)
        self.e.mask = kept

    def scratch(self, statement: Scratch) -> None:
        """A tile. It is the same memory wherever the statement is written again: what was in it is over by then."""
        tiles = self.e.function.memory
        if statement not in tiles:
            sizes = [max(size.high or 0, 1) for size in statement.sizes]
            strides = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
            element = MEMORY[statement.dtype]
            tile = Memory(self.room(math.prod(sizes), element), element, strides)
            tiles[statement] = tile
            if self.e.module.tile_code:
                low = self.e.op(f"ptrtoint ptr {tile.pointer} to i64", tile.pointer)
                high = self.e.op(f"add i64 {low}, {math.prod(sizes) * BYTES[element]}", low)
                tile.bounds = AddressBounds(low, high, self.e.module.tile_code)
        self.e.memory[statement.name] = tiles[statement]
        tiles[statement].version += 1

    def room(self, count: int, element: str) -> str:
        """Memory of the function's own: on its stack while there is room."""
        function, size = self.e.function, count * BYTES[element]
        if function.stack + size <= MAX_STACK_BYTES:
            function.stack += size
            return function.variable(f"[{count} x {element}], align 64")
        if not function.tiles:
            stop_without_tiles(self.e)
        pointer = function.op(f"getelementptr i8, ptr %tiles, i64 {function.tiles}")
        function.tiles += -(-size // 64) * 64
        return pointer

    # --- loops --------------------------------------------------------------------------------------------------------

    def loop(self, loop: Loop) -> None:
        if loop.kind == "unrolled":
            assert isinstance(loop.axis.extent, Number)
            for place in range(loop.axis.extent.value):
                self.at(loop, AxisValue(str(place), written_out=loop.axis.extent.value))
        elif loop.kind == "parallel" and not self.e.parallel and not self.accumulators.open:
            self.parallel(loop)
        elif loop.kind in ("vector", "reduction") and not self.needs_one_by_one(loop):
            self.vector(loop, 1 if self.e.lanes > 1 else loop.lanes, loop.copies)
        else:
            self.serial(loop)

    def needs_one_by_one(self, loop: Loop) -> bool:
        """Whether iterations need loops or memory of their own."""
        inside = list(walk(loop.body))
        named = {item.name for item in inside if isinstance(item, Let)}
        return any(
            isinstance(item, Scratch) or (isinstance(item, Loop) and decides(loop.axis, named, item.axis.extent))
            for item in inside
        )

    def serial(self, loop: Loop) -> None:
        limit = self.expressions.indices.scalar(loop.axis.extent)
        self.counted(loop, "0", limit, 1, self.runs(loop.axis.extent), lambda base: self.at(loop, AxisValue(base)))

    def runs(self, extent: Index, step: int = 1) -> bool:
        return extent.low is not None and extent.low >= step

    def at(self, loop: Loop, value: AxisValue) -> None:
        self.e.axes[loop.axis] = value
        self.block(loop.body)

    def counted(self, loop: Loop, start: str, limit: str, step: int, runs: bool, body: Callable[[str], None]) -> None:
        """A loop that counts from start by steps while it is below the limit."""
        function = self.e.function
        mark = next(function.counter)
        before, inside, end = f"before{mark}", f"loop{mark}", f"end{mark}"
        if runs:
            function.line(f"br label %{before}")
        else:
            some = self.e.op(f"icmp slt i64 {start}, {limit}", start, limit)
            function.line(f"br i1 {some}, label %{before}, label %{end}")
        function.block(before)
        writes = self.written(loop.body)
        for name in writes & self.e.memory.keys():
            self.e.memory[name].version += 1
        outer = function.push(before, open=True, runs=runs)
        scope = function.push(inside, writes=writes)
        base = function.fresh("i")
        function.rank[base] = scope.depth
        body(base)
        following = function.define(f"add nuw nsw i64 {base}, {step}")
        more = function.define(f"icmp slt i64 {following}, {limit}")
        function.pop()
        function.pop()
        phi = f"  {base} = phi i64 [ {start}, %{outer.label} ], [ {following}, %{scope.label} ]"
        again = f"  br i1 {more}, label %{inside}, label %{end}"
        function.scope.code += [outer.code, f"  br label %{inside}", f"{inside}:", phi, scope.code, again]
        function.block(end)

    def written(self, body: Body) -> frozenset[str]:
        return frozenset(item.buffer for item in walk(tuple(body)) if isinstance(item, Store))

    # --- lanes and copies ---------------------------------------------------------------------------------------------

    def vector(self, loop: Loop, lanes: int, copies: int) -> None:
        extent, step = loop.axis.extent, lanes * copies
        if isinstance(extent, Number):
            self.vector_of_number(loop, extent.value, lanes, copies)
            return
        limit = self.expressions.indices.scalar(extent)
        covered = self.rounded(extent, limit, step)
        self.counted(
            loop, "0", covered, step, self.runs(extent, step), lambda base: self.copied(loop, base, lanes, copies)
        )
        if copies > 1 and not self.divides(extent, step):
            start, covered = covered, self.rounded(extent, limit, lanes)
            self.counted(loop, start, covered, lanes, False, lambda base: self.copied(loop, base, lanes, 1))
        if lanes > 1 and not self.divides(extent, lanes):
            self.tail(loop, covered, limit, lanes)

    def vector_of_number(self, loop: Loop, extent: int, lanes: int, copies: int) -> None:
        step = lanes * copies
        covered = extent // step * step
        if covered > step:
            self.counted(loop, "0", str(covered), step, True, lambda base: self.copied(loop, base, lanes, copies))
        elif covered:
            self.copied(loop, "0", lanes, copies)
        full_vectors = (extent - covered) // lanes
        if full_vectors:
            self.copied(loop, str(covered), lanes, full_vectors)
        left = extent - covered - full_vectors * lanes
        if left & (left - 1):
            self.repeating(loop, str(covered + full_vectors * lanes), left, lanes)
        elif left:
            self.copied(loop, str(covered + full_vectors * lanes), left, 1)

    def divides(self, extent: Index, step: int) -> bool:
        return extent % number(step) is ZERO

    def rounded(self, extent: Index, limit: str, step: int) -> str:
        """The extent without what is left after whole steps."""
        if self.divides(extent, step):
            return limit
        rest = self.expressions.indices.scalar(extent % number(step))
        return self.e.op(f"sub nsw i64 {limit}, {rest}", limit, rest)

    def copied(
        self,
        loop: Loop,
        base: str,
        lanes: int,
        copies: int,
        offsets: Sequence[str] | None = None,
        live: Value | None = None,
    ) -> None:
        """The body once, for some copies of some lanes; where lanes repeat others, with offsets of their own."""
        e = self.e
        kept = e.lanes, e.replicas, e.live
        e.replicas *= copies
        if lanes > 1:
            e.lanes = lanes
        e.live = live or e.live
        shifts = tuple(lanes * (replica % copies) for replica in range(e.replicas)) if copies > 1 else (0,)
        places = tuple(offsets or map(str, range(lanes)))
        self.at(loop, AxisValue(base, shifts, places, 1 if offsets else lanes, offsets is not None))
        e.lanes, e.replicas, e.live = kept

    def repeating(self, loop: Loop, base: str, left: int, lanes: int) -> None:
        """So many lanes, and repetitions of the last: vectors of odd lengths are not what machines have."""
        offsets = [str(min(lane, left - 1)) for lane in range(lanes)]
        mask = f"<{', '.join('i1 true' if lane < left else 'i1 false' for lane in range(lanes))}>"
        self.copied(loop, base, lanes, 1, offsets, Value((mask,), "i1", lanes))

    def tail(self, loop: Loop, covered: str, limit: str, lanes: int) -> None:
        """What is left after whole vectors, as one vector whose last lanes may repeat."""
        e = self.e
        left = e.op(f"sub nsw i64 {limit}, {covered}", limit, covered)
        with e.branch(e.op(f"icmp sgt i64 {left}, 0", left)):
            last = e.op(f"sub nsw i64 {left}, 1", left)
            offsets = ["0", *(e.intrinsic("smin", "i64", 1, last, str(lane)) for lane in range(1, lanes))]
            counted = f"<{', '.join(f'i64 {lane}' for lane in range(lanes))}>"
            limits = e.splat(left, "i64", lanes)
            mask = e.op(f"icmp slt {vector('i64', lanes)} {counted}, {limits}", limits)
            self.copied(loop, covered, lanes, 1, offsets, Value((mask,), "i1", lanes))


def decides(axis: Axis, named: set[str], extent: Index) -> bool:
    """Whether an extent may be another at every place along an axis: by itself, or by what was read there."""
    if axis in extent.atoms:
        return True
    read = nodes_of(*data_of(extent)) if data_of(extent) else []
    return any((isinstance(item, Local) and item.name in named) or axis in item.atoms for item in read)
