"""Scalar expressions as instructions: every node once, for all copies and lanes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrite.codegen.llvm import byte_dots, integer_division  # noqa: F401  (they add their rows)
from ferrite.codegen.llvm.access import LoadsAndStores
from ferrite.codegen.llvm.addresses import Addresses, flat_index
from ferrite.codegen.llvm.casts import cast
from ferrite.codegen.llvm.checks import stop_where
from ferrite.codegen.llvm.emission import Emission, Value
from ferrite.codegen.llvm.indices import LIMIT_IN_32_BITS, Indices, factor_of
from ferrite.codegen.llvm.math import calls  # noqa: F401  (it adds its rows)
from ferrite.codegen.llvm.operators import ROWS, Words, is_float
from ferrite.codegen.llvm.random_numbers import WORDS, random_row, random_value
from ferrite.codegen.llvm.types import REGISTER, literal
from ferrite.ir import (
    ONE,
    STOPPING,
    ZERO,
    Cast,
    Const,
    Data,
    Expr,
    Index,
    IndexValue,
    Load,
    Local,
    Masked,
    Op,
    Param,
    Random,
    data_of,
    indices_of,
    interval,
    is_below_extent,
    number,
)
from ferrite.ir.kernel import Notes

Memo = dict[Expr, Value]


class Expressions:
    def __init__(self, emission: Emission, checks: Sequence[Data]) -> None:
        self.e = emission
        self.checks = {check: place for place, check in enumerate(checks, 1)}
        self.indices = Indices(emission, self.checked)
        self.access = LoadsAndStores(emission, Addresses(emission, self.indices))
        self.memo: Memo = {}
        self.params: Sequence[Value] = ()
        self.found: dict[Data, Value] = {}
        self.under: dict[Value, tuple[Memo, dict[Data, Value]]] = {}  # what is known under a mask
        self.open: dict[str, Callable[[], Value]] = {}  # states whose block is not over
        self.notes: Notes | None = None  # where lines are to say what they come from

    def begin(self) -> None:
        """A statement begins: memory may have changed."""
        self.memo, self.found, self.under = {}, {}, {}

    def values(self, *roots: Expr) -> list[Value]:
        self.begin()
        return [self.value(root) for root in roots]

    def with_params(self, roots: Sequence[Expr], params: Sequence[Value]) -> list[Value]:
        """Expressions over parameters, as they are in a state's rules."""
        kept, self.params, self.memo = (self.params, self.memo), params, {}
        made = [self.value(root) for root in roots]
        self.params, self.memo = kept
        return made

    def value(self, root: Expr) -> Value:
        memo = self.memo
        stack = [root]
        while stack:  # no recursion: expressions may be deep
            item = stack[-1]
            if item in memo:
                stack.pop()
                continue
            wanted = [part for part in self.parts(item) if part not in memo]
            if wanted:
                stack += wanted
                continue
            memo[item] = self.made(item) if self.notes is None else self.made_noted(item, self.notes)
            stack.pop()
        return memo[root]

    def made_noted(self, item: Expr, notes: Notes) -> Value:
        function = self.e.function
        before, function.note = function.note, notes.value(function.note, item)
        value = self.made(item)
        function.note = before
        return value

    def parts(self, item: Expr) -> Sequence[Expr]:
        """What is evaluated before a node; what stands under a mask has to wait for the mask."""
        if isinstance(item, Masked):
            return (item.mask, item.other)
        if self.is_word(item):
            return ()
        inside = [value for index in indices_of(item) for value in data_of(index)]
        return (*inside, *item.args) if inside else item.args

    def made(self, item: Expr) -> Value:
        e = self.e
        match item:
            case Const():
                return Value((literal(item.bits, item.dtype),), REGISTER[item.dtype])
            case Local():
                return self.open[item.name]() if item.name in self.open else e.local(item.name)
            case Param():
                return self.params[item.position]
            case IndexValue():
                return self.index_value(item.index, item.dtype)
            case Load():
                return self.access.load(item)
            case Cast():
                return self.converted(item)
            case Masked():
                return self.masked(item)
            case Random():
                return self.random(item)
            case Op():
                return self.operator(item)
        raise TypeError(f"no code for {type(item).__name__}")

    def converted(self, item: Cast) -> Value:
        """Between floats and long integers by way of short ones, where the value is known to be one: vectors have
        instructions for these."""
        e, value, old, new = self.e, self.memo[item.arg], item.arg.dtype, item.dtype
        if torch.int64 in (old, new) and torch.float32 in (old, new) and is_short(item.arg):
            return cast(e, cast(e, value, old, torch.int32), torch.int32, new)
        return cast(e, value, old, new)

    def random(self, item: Random) -> Value:
        e, seed, stream = self.e, self.memo[item.seed], self.wide_index(item.stream)
        if (
            item.kind == "uniform"
            and item.dtype is not torch.float64
            and seed.lanes == stream.lanes == 1
            and self.by_fours(item.counter)
        ):
            copies = range(self.indices.copies(item.counter))
            firsts = [self.indices.at(item.counter, copy, "i64", lane_zero=True).name for copy in copies]
            return random_row(e, seed, firsts, stream, item.dtype)
        return random_value(e, item.kind, seed, self.wide_index(item.counter), stream, item.dtype)

    def by_fours(self, counter: Index) -> bool:
        """Whether lanes count on from a multiple of four."""
        axis = self.access.places.moving_axis(counter)
        if axis is None or self.e.axes[axis].repeats or self.e.axes[axis].aligned % WORDS:
            return False
        return factor_of(counter, axis) is ONE and (counter - axis) % WORDS is ZERO

    def is_word(self, item: Expr) -> bool:
        """Whether it is four bytes that lie side by side in memory: they are loaded as the word that they are."""
        if not isinstance(item, Op) or item.name != "pack_bytes" or self.e.mask is not None:
            return False
        first = item.operands[0]
        if not isinstance(first, Load) or any(map(data_of, first.coordinates)):
            return False
        memory = self.e.memory[first.buffer]
        return all(
            isinstance(each, Load)
            and each.buffer == first.buffer
            and flat_index(memory, each.coordinates) - flat_index(memory, first.coordinates) is number(place)
            for place, each in enumerate(item.operands)
        )

    def operator(self, item: Op) -> Value:
        if self.is_word(item):
            (first, *_) = item.operands
            assert isinstance(first, Load)
            return self.access.load_word(first)
        e, values = self.e, [self.memo[operand] for operand in item.operands]
        if item.name == "where":
            return self.chosen(*values)
        if item.name == "bitcast":
            return self.reinterpreted(values[0], item)
        dtype, element = item.operands[0].dtype, REGISTER[item.dtype]
        if item.name in STOPPING and not is_float(dtype) and e.mask is not None:
            values.append(e.mask)
        make = ROWS[item.name]
        return e.map(element, values, lambda lanes, *parts: make(e, dtype, lanes, *parts))

    def chosen(self, condition: Value, yes: Value, no: Value) -> Value:
        def pick(lanes: int, *parts: str) -> str:
            return Words(self.e, yes.element, lanes).select(*parts)

        if condition.lanes == 1 and max(yes.lanes, no.lanes) > 1:
            return self.by_one_condition(condition, yes, no)
        return self.e.map(yes.element, [condition, yes, no], pick)

    def by_one_condition(self, condition: Value, yes: Value, no: Value) -> Value:
        """Vectors chosen by a scalar."""
        e, lanes = self.e, max(yes.lanes, no.lanes)
        count = max(len(value.parts) for value in (condition, yes, no))
        type_, parts = e.widened(yes, lanes).type, []
        for row in range(count):
            bit, one, other = (e.part(condition, row, count, 1), *(e.part(v, row, count, lanes) for v in (yes, no)))
            parts.append(e.op(f"select i1 {bit}, {type_} {one}, {type_} {other}", bit, one, other))
        return Value(tuple(parts), yes.element, lanes)

    def reinterpreted(self, value: Value, item: Op) -> Value:
        target = REGISTER[item.dtype]

        def make(lanes: int, part: str) -> str:
            w = Words(self.e, value.element, lanes)
            if "i1" in (target, value.element) and target != value.element:
                return w.compare("ne", part, w.const(0)) if target == "i1" else w.convert("zext", part, target)
            return part if target == value.element else w.convert("bitcast", part, target)

        return self.e.map(target, [value], make)

    # --- indices ------------------------------------------------------------------------------------------------------

    def index_value(self, index: Index, dtype: torch.dtype) -> Value:
        found = self.indices.value(index)
        return cast(self.e, found, torch.int32 if found.element == "i32" else torch.int64, dtype)

    def wide_index(self, index: Index) -> Value:
        return self.index_value(index, torch.int64)

    def checked(self, atom: Data) -> Value:
        """A value from memory as an index, once it is known to be inside."""
        if atom not in self.found:
            self.found[atom] = self.check(atom)
        return self.found[atom]

    def check(self, atom: Data) -> Value:
        e, code = self.e, self.checks[atom]
        value = cast(e, self.value(atom.value), atom.value.dtype, torch.int64)
        if is_below_extent(atom):
            return value
        extent, mask = self.wide_index(atom.extent), e.mask
        if mask is not None and mask.lanes > max(value.lanes, extent.lanes):
            mask = e.map("i1", [mask], lambda lanes, item: e.any_lane(item, lanes)).as_scalars()

        def inside(lanes: int, item: str, most: str, counts: str | None = None) -> str:
            w = Words(e, "i64", lanes)
            bad = w.compare("uge", item, most)
            if counts is not None:
                bad = e.op(f"and {w.bits} {bad}, {counts}", bad, counts)
            stop_where(e, bad, lanes, code, item, most)
            rank = e.function.rank
            if rank.get(bad, 0) <= rank.get(item, 0):
                return item
            # The check stands farther in than the value: nothing that uses the value may stand farther out.
            return e.function.op(f"freeze {w.type} {item}", item, bad, key=f"checked {item} {bad}")

        return e.map("i64", [value, extent, *([mask] if mask is not None else [])], inside)

    # --- masks --------------------------------------------------------------------------------------------------------

    def masked(self, item: Masked) -> Value:
        """The value under its mask: what it loads and checks is its own, other things are found again."""
        mask, kept = self.memo[item.mask], (self.e.mask, self.memo, self.found)
        self.e.mask = mask if kept[0] is None else self.both(kept[0], mask)
        self.memo, self.found = self.under.setdefault(self.e.mask, ({}, {}))
        value = self.value(item.value)
        self.e.mask, self.memo, self.found = kept
        return self.chosen(mask, value, self.memo[item.other])

    def both(self, left: Value, right: Value) -> Value:
        return self.e.map("i1", [left, right], lambda lanes, *pair: Words(self.e, "i1", lanes).op("and", *pair))


def is_short(value: Expr) -> bool:
    """Whether its form tells that a value, without its fraction, fits into 32 bits."""
    found = interval(value)
    return found is not None and found[0] > -LIMIT_IN_32_BITS and found[1] < LIMIT_IN_32_BITS
