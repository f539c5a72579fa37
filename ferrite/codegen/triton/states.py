"""Accumulation in Triton: a block of partial states that values update lane by lane, reduced when the statement ends.

A state of kind "own" has no identity, so one part more says whether it was updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ferrite.codegen.triton.module import BlockAxis, Lines, Module, Scope, Value
from ferrite.codegen.triton.operators import ALL, filled, type_name
from ferrite.codegen.triton.values import Evaluation, filling
from ferrite.ir import STATES, Cast, Const, Load, Local, bits_of, const, short
from ferrite.ir.kernel import OWN, Accumulate, Loop, State, Statement, Update, inner, nodes_in, walk

# Lanes of a block that one thread has side by side: 16 bytes of a 16-bit type are one load.
LANES_TOGETHER = 8
# What changes no state of a kind; of a softmax, where it is not lifted to a state by itself, which counts it.
NOTHING = {"sum": 0.0, "amax": -math.inf, "amin": math.inf, "softmax": -math.inf}
Part = tuple[int, torch.dtype]  # the bits of a part of a state before any update, and its type


@dataclass
class Accumulator:
    """`texts`: the variables of the state so far; none before the first update. `axes`: those of its lanes.

    `spread`: whether lanes have states of their own. `straight`: the value of the one update may be the state itself.
    `moving`: of a softmax, the greatest is that of all lanes, and each has a sum relative to it. `together`: instead of
    lanes, so many side by side have a state.
    """

    state: State
    function: str
    parts: tuple[Part, ...]
    scope: Scope
    spread: bool
    straight: bool
    slot: Lines
    level: int
    texts: tuple[str, ...] = ()
    axes: tuple[BlockAxis, ...] = ()
    moving: bool = False
    together: int = 1

    @property
    def depth(self) -> int:
        return len(self.scope.axes)

    def filled(self, shape: str) -> list[str]:
        return [filled(bits, dtype, shape) for bits, dtype in self.parts]


class Accumulators:
    """Those whose statements are being written, by the first of their names."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.open: dict[str, Accumulator] = {}

    def begin(self, statement: Accumulate, scope: Scope) -> None:
        for state in statement.states:
            paths = _paths(statement.body, state.names[0])
            # Where loops differ their lanes do too; and who reads it before its end wants it whole.
            spread = all(path == paths[0] for path in paths) and not _is_read(statement.body, state)
            slot = self.module.slot()
            found = Accumulator(
                state, self.function(state), _parts(state), scope, spread, len(paths) == 1, slot, self.module.level
            )
            self.open[state.names[0]] = found
            if not spread or not paths:
                self.start(found, scope.axes)

    def start(self, found: Accumulator, axes: tuple[BlockAxis, ...]) -> None:
        """Name the parts, and fill them before the statement."""
        module, found.axes = self.module, axes
        found.texts = tuple(module.fresh(name) for name in _names(found.state))
        level, lines = module.level, module.lines
        module.level, module.lines = found.level, found.slot
        shapes = [Scope(axes).shape()] * len(found.texts)
        if found.together > 1:
            shapes = [f"[{int(axes[-1].block.name) // found.together}]"] * len(found.texts)
        if found.moving:
            shapes[0] = found.scope.shape()
        for text, (bits, dtype), shape in zip(found.texts, found.parts, shapes, strict=True):
            module.line(f"{text} = {filled(bits, dtype, shape)}")
        module.level, module.lines = level, lines
        for name, text in zip(found.state.names, found.texts, strict=False):
            module.name_value(name, Value(text, Scope(axes).dims))

    def is_sum_of(self, name: str, scope: Scope) -> bool:
        """Whether a state is one sum for each lane of a scope."""
        found = self.open[name]
        return found.state.kind == "sum" and found.spread and found.straight and found.scope.axes == scope.axes

    def started(self, name: str) -> Accumulator:
        """A state with a value for each lane around its statement, before any has joined."""
        found = self.open[name]
        self.start(found, found.scope.axes)
        return found

    def update(self, statement: Update, scope: Scope) -> None:
        found = self.open[statement.state]
        evaluation = Evaluation(self.module, scope)
        one_sum = found.state.kind == "softmax" and found.spread and found.straight and len(statement.values) == 1
        is_lifted = found.spread and found.straight and found.level == self.module.level
        in_order = scope.scan is not None
        together = one_sum and not is_lifted and not in_order and len(scope.axes) == 1 > found.depth
        together = together and lanes_are_shared(scope)
        fills = not in_order and (together or found.state.kind != "softmax") and found.state.kind in NOTHING
        loaded = loaded_number(statement) if fills else None
        if loaded is not None:
            nothing = const(NOTHING[found.state.kind], loaded.dtype)
            loaded = None if filling(nothing) is None else loaded
        if loaded is not None:
            evaluation.fillings.setdefault((loaded, scope.masks), nothing)
        given = [evaluation.value(value) for value in statement.values]
        values = self.lifted(found.state, given, scope)
        counted = evaluation.guard(scope.masks, scope.dims)
        if loaded is not None and evaluation.key(loaded, scope.masks) in evaluation.known:
            number = evaluation.get(loaded, scope.masks)
            if number.dims == scope.dims and self.module.filled.get(number.text) == (nothing, scope.masks):
                counted = None  # lanes that do not count have loaded what changes nothing
        if scope.scan is not None:
            self.prefixes(found, values, counted, scope, scope.scan)
            return
        if is_lifted:
            found.axes = scope.axes
            found.texts = tuple(self.spread(found, values, counted, scope))
            return
        if together:
            self.move_lanes(found, given[0], counted, scope)
            return
        if one_sum and len(scope.axes) > found.depth:
            self.move(found, given[0], counted, scope)
            return
        if found.spread and not found.texts:
            self.start(found, scope.axes)
        if not found.spread and len(scope.axes) > found.depth:
            texts = self.spread(found, values, counted, scope)
            dims = found.scope.dims
            values = [Value(text, dims) for text in self.reduced(found, texts, len(scope.axes))]
            counted = None  # lanes that do not count were nothing in it
            given = values
        take = self.take_function(found.state) if len(given) < len(found.state.names) else None
        if take:
            self.combine(found, given, counted, take)
        else:
            self.combine(found, values, counted, found.function)

    def are_read(self) -> bool:
        """Whether a state may be read before its end: it is another value after the next update."""
        return any(not found.spread for found in self.open.values())

    def combine(self, found: Accumulator, values: Sequence[Value], counted: Value | None, function: str) -> None:
        if not found.spread:
            self.module.known.clear()
        rank = len(found.axes)
        call = f"{function}({', '.join([*found.texts, *(value.at(rank) for value in values)])})"
        if counted is None:
            self.module.line(f"{', '.join(found.texts)} = {call}")
            return
        new = [self.module.fresh("joined") for _ in found.texts]
        self.module.line(f"{', '.join(new)} = {call}")
        for text, joined in zip(found.texts, new, strict=True):
            self.module.line(f"{text} = tl.where({counted.at(rank)}, {joined}, {text})")

    def move(self, found: Accumulator, value: Value, counted: Value | None, scope: Scope) -> None:
        """A block updates a softmax: one exponential for each lane, after the greatest of the block is known."""
        module, state, rank = self.module, found.state, len(scope.axes)
        if not found.texts:
            found.moving = True
            self.start(found, scope.axes)
        most, total = found.texts
        values = self.spread(found, [value, value], counted, scope)[0]
        (greatest,) = self.reduced(
            found, [values], rank, self.function(State("amax", state.names[:1], state.dtypes[:1]))
        )
        around = frozenset(range(found.depth))
        joined = module.set(state.names[0], f"tl.maximum({most}, {greatest}, {ALL})")
        exp = self.exponential(state) if module.quick else "libdevice.exp"
        wide = Value(joined, around).at(rank)
        lanes = module.set("v", f"tl.where({values} == {wide}, 1.0, {exp}({values} - {wide}))")
        if counted is not None:
            lanes = f"tl.where({counted.at(rank)}, {lanes}, 0.0)"
        scale = module.set("v", f"tl.where({most} == {joined}, 1.0, {exp}({most} - {joined}))")
        module.line(f"{total} = {total} * {Value(scale, around).at(rank)} + {lanes}")
        module.line(f"{most} = {joined}")

    def exponential(self, state: State) -> str:
        """Of what is not above zero: beside the one of the greatest, what is below 1e-38 is nothing."""
        if state.dtypes[0] is not torch.float32:
            return "libdevice.exp"
        self.module.needs("quick_exp")
        return "quick_exp"

    def move_lanes(self, found: Accumulator, value: Value, counted: Value | None, scope: Scope) -> None:
        """The same for one row: lanes that one thread has, side by side, share a greatest and a sum, so that threads
        tell each other nothing before the end, and there is one exponential for each lane, and one for all of them.
        Measured: sums of 4096 rows of 50304 numbers in bf16, 113 us (the memory's time is 99), 173 with one greatest
        for all threads, 176 with one for each lane."""
        module, state = self.module, found.state
        values = self.spread(found, [value, value], counted, scope)[0]
        lanes = int(scope.axes[-1].block.name) // LANES_TOGETHER
        if not found.texts:
            found.together = LANES_TOGETHER
            self.start(found, scope.axes)
        most, total = found.texts
        grouped = module.set("v", f"tl.reshape({values}, [{lanes}, {LANES_TOGETHER}])")
        greatest = self.function(State("amax", state.names[:1], state.dtypes[:1]))
        joined = module.set(state.names[0], f"tl.maximum({most}, tl.reduce({grouped}, 1, {greatest}), {ALL})")
        base = module.set("v", f'tl.where({joined} == float("-inf"), 0.0, {joined})')
        exp = self.exponential(state)
        sums = self.function(State("sum", state.names[1:], state.dtypes[1:]))
        here = f"tl.reduce({exp}({grouped} - {base}[:, None]), 1, {sums})"
        module.line(f"{total} = {total} * {exp}({most} - {base}) + {here}")
        module.line(f"{most} = {joined}")

    def prefixes(
        self, found: Accumulator, values: Sequence[Value], counted: Value | None, scope: Scope, dim: int
    ) -> None:
        """What every lane comes to with those before it, and what the blocks before had come to."""
        if not found.texts:
            self.start(found, found.scope.axes)
        texts = self.spread(found, values, counted, scope)
        given = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
        so_far = [self.module.fresh(name) for name in _names(found.state)]
        self.module.known.clear()
        if scope.sorts:
            self.module.needs("sort_lanes")
            self.module.line(f"{so_far[0]} = sort_lanes({given}, {dim})")
            found.texts = tuple(self.reduced(found, so_far, len(scope.axes)))
            self.module.name_value(found.state.names[0], Value(so_far[0], scope.dims))
            return
        self.module.line(f"{', '.join(so_far)} = tl.associative_scan({given}, {dim}, {found.function})")
        around = frozenset(range(found.depth))
        if self.module.level > found.level:
            before = [Value(text, around).at(len(scope.axes)) for text in found.texts]
            joined = [self.module.fresh(name) for name in _names(found.state)]
            self.module.line(f"{', '.join(joined)} = {found.function}({', '.join([*before, *so_far])})")
            so_far = joined
        for text, lanes, (_, dtype) in zip(found.texts, so_far, found.parts, strict=True):
            self.module.needs("either_bits")
            self.module.line(f"{text} = {_last(lanes, dtype, dim, scope)}")
        for name, text in zip(found.state.names, so_far, strict=False):
            self.module.name_value(name, Value(text, scope.dims))

    def end(self, statement: Accumulate) -> None:
        ended = [self.open.pop(state.names[0]) for state in statement.states]
        for found in ended:
            if not found.texts:
                self.start(found, found.scope.axes)
        sums = self.sums_at_once(ended)
        for place, found in enumerate(ended):
            if place in sums:
                texts = [sums[place]]
            else:
                moved = found.moving or found.together > 1
                texts = self.moved(found) if moved else self.reduced(found, found.texts, len(found.axes))
            for name, text in zip(found.state.names, texts, strict=False):
                self.module.name_value(name, Value(text, found.scope.dims))
            if found.state.kind == "softmax":  # the greatest itself is one of the sum, or the sum is NaN
                self.module.at_least_one.add(found.state.names[1])

    def sums_at_once(self, ended: Sequence[Accumulator]) -> dict[int, str]:
        """Sums of the same lanes, by their places, where there are several: threads tell each other once."""
        alike: dict[object, list[int]] = {}
        for place, found in enumerate(ended):
            if found.state.kind == "sum" and not found.moving and len(found.axes) > found.depth:
                alike.setdefault((found.axes, found.depth, found.state.dtypes), []).append(place)
        results: dict[int, str] = {}
        for places in alike.values():
            if len(places) < 2:
                continue
            one, texts = ended[places[0]], [ended[place].texts[0] for place in places]
            for dim in reversed(range(one.depth, len(one.axes))):
                new = [self.module.fresh(ended[place].state.names[0]) for place in places]
                function = self.function_of_several(one.function, len(places))
                self.module.line(f"{', '.join(new)} = tl.reduce(({', '.join(texts)}), {dim}, {function})")
                texts = new
            results.update(zip(places, texts, strict=True))
        return results

    def function_of_several(self, function: str, count: int) -> str:
        """The name of a function that combines so many pairs as another one combines a pair."""
        name = f"{function}_{count}"
        if name not in self.module.functions:
            sides = [[f"{side}_{place}" for place in range(count)] for side in ("left", "right")]
            joined = ", ".join(f"{function}({left}, {right})" for left, right in zip(*sides, strict=True))
            self.module.names.add(name)
            self.module.functions[name] = f"def {name}({', '.join(sides[0] + sides[1])}):\n    return {joined}\n"
        return name

    # --- lanes --------------------------------------------------------------------------------------------------------

    def lifted(self, state: State, values: list[Value], scope: Scope) -> list[Value]:
        """Values as a state of the kind."""
        if state.kind == OWN:
            return [*values, Value("tl.full([], True, tl.int1)")]
        if len(values) == len(state.names):
            return values
        evaluation = Evaluation(self.module, scope, values)
        return [evaluation.value(part) for part in STATES[state.kind].lift(state.dtypes)]

    def spread(self, found: Accumulator, values: Sequence[Value], counted: Value | None, scope: Scope) -> list[str]:
        """One state for every lane of the scope; nothing where a lane does not count."""
        rank, texts = len(scope.axes), []
        for value, nothing, name in zip(values, found.filled("[]"), _names(found.state), strict=True):
            text, dims = value.at(rank), value.dims
            if counted is not None:
                text, dims = f"tl.where({counted.at(rank)}, {text}, {nothing})", dims | counted.dims
            if dims != scope.dims:
                text = f"tl.broadcast_to({text}, {scope.shape()})"
            texts.append(self.module.set(name, text))
        return texts

    def moved(self, found: Accumulator) -> list[str]:
        """The sums of all lanes, combined. Where the greatest is infinite there is none, as inf - inf is."""
        most, total = found.texts
        if found.together > 1:
            greatest = self.function(State("amax", found.state.names[:1], found.state.dtypes[:1]))
            (top,) = self.reduced(found, [most], len(found.axes), greatest)
            base = self.module.set("v", f'tl.where({top} == float("-inf"), 0.0, {top})')
            exp = self.exponential(found.state)
            most, total = top, self.module.set("v", f"{total} * {exp}({most} - {base})")
        function = self.function(State("sum", found.state.names[1:], found.state.dtypes[1:]))
        (total,) = self.reduced(found, [total], len(found.axes), function)
        nan = filled(bits_of(math.nan, found.state.dtypes[1]), found.state.dtypes[1], "[]")
        total = self.module.set(found.state.names[1], f'tl.where({most} == float("inf"), {nan}, {total})')
        return [most, total]

    def reduced(self, found: Accumulator, texts: Sequence[str], rank: int, function: str = "") -> list[str]:
        """The lanes of the dimensions beyond those around the statement, combined."""
        texts = list(texts)
        for dim in reversed(range(found.depth, rank)):
            new = [self.module.fresh(name) for name in _names(found.state)[: len(texts)]]
            given = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
            self.module.line(f"{', '.join(new)} = tl.reduce({given}, {dim}, {function or found.function})")
            texts = new
        return texts

    # --- the function that combines -----------------------------------------------------------------------------------

    def function(self, state: State) -> str:
        """The name of the function that combines two states, printed once."""
        name = f"join_{state.kind}_{'_'.join(map(short, state.dtypes))}"
        if state.kind == OWN:
            name = self.module.fresh(f"join_{state.names[0]}")
        if name not in self.module.functions:
            self.module.names.add(name)
            self.module.functions[name] = self.function_text(name, state)
        return name

    def take_function(self, state: State) -> str | None:
        """The name of the function that combines a state with one value, where its kind has one."""
        take = STATES[state.kind].take if state.kind in STATES else None
        if take is None:
            return None
        name = f"take_{state.kind}_{'_'.join(map(short, state.dtypes))}"
        if name not in self.module.functions:
            self.module.names.add(name)
            inside = Module(checks=(), quick=self.module.quick)
            texts = [inside.fresh(part) for part in (*state.names, "value")]
            evaluation = Evaluation(inside, Scope(), [Value(text) for text in texts])
            results = [evaluation.value(part).text for part in take(state.dtypes)]
            inside.line(f"return {', '.join(results)}")
            self.module.helpers.update(inside.helpers)
            self.module.functions[name] = f"def {name}({', '.join(texts)}):\n{inside.text()}"
        return name

    def function_text(self, name: str, state: State) -> str:
        inside = Module(checks=(), quick=self.module.quick)
        count = len(_names(state))
        sides = [[inside.fresh(f"{side}_{place}") for place in range(count)] for side in ("left", "right")]
        parts = len(state.names)
        params = [Value(text) for side in sides for text in side[:parts]]
        evaluation = Evaluation(inside, Scope(), params)
        combine = state.combine or STATES[state.kind].combine(state.dtypes)
        results = [evaluation.value(part).text for part in combine]
        if state.kind == OWN:
            (*left, had), (*right, has) = sides
            results = [
                f"tl.where({had} & {has}, {both}, tl.where({had}, {old}, {new}))"
                for both, old, new in zip(results, left, right, strict=True)
            ]
            results.append(f"{had} | {has}")
        inside.line(f"return {', '.join(results)}")
        self.module.helpers.update(inside.helpers)
        return f"def {name}({', '.join(sides[0] + sides[1])}):\n{inside.text()}"


def _last(text: str, dtype: torch.dtype, dim: int, scope: Scope) -> str:
    """The last lane of a block along a dimension: bit by bit, so that nothing is added to it."""
    size = scope.axes[dim].block.most
    lane = ["None"] * len(scope.axes)
    lane[dim] = ":"
    is_last = f"tl.arange(0, {size})[{', '.join(lane)}] == {size - 1}"
    if not dtype.is_floating_point:
        wide = f"tl.cast({text}, tl.int64)"
        last = f"tl.reduce(tl.where({is_last}, {wide}, 0), {dim}, either_bits)"
        return f"({last} != 0)" if dtype is torch.bool else f"tl.cast({last}, {type_name(dtype)})"
    integer = type_name({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits = f"tl.cast({text}, {integer}, bitcast=True)"
    last = f"tl.reduce(tl.where({is_last}, {bits}, 0), {dim}, either_bits)"
    return f"tl.cast({last}, {type_name(dtype)}, bitcast=True)"


def _names(state: State) -> tuple[str, ...]:
    return (*state.names, f"{state.names[0]}_joined") if state.kind == OWN else state.names


def _parts(state: State) -> tuple[Part, ...]:
    if state.kind == OWN:
        return (*((0, dtype) for dtype in state.dtypes), (0, torch.bool))
    begin = STATES[state.kind].begin(state.dtypes)
    return tuple((part.bits, part.dtype) for part in begin if isinstance(part, Const))


def _paths(body: tuple[Statement, ...], name: str, around: tuple[Loop, ...] = ()) -> list[tuple[Loop, ...]]:
    """The loops around every update of a state."""
    found: list[tuple[Loop, ...]] = []
    for statement in body:
        if isinstance(statement, Update) and statement.state == name:
            found.append(around)
        found += _paths(inner(statement), name, (*around, statement) if isinstance(statement, Loop) else around)
    return found


def _is_read(body: tuple[Statement, ...], state: State) -> bool:
    return any(
        isinstance(item, Local) and item.name in state.names for statement in walk(body) for item in nodes_in(statement)
    )


def lanes_are_shared(scope: Scope) -> bool:
    """Whether all lanes of a row can be parted among threads, so many side by side each."""
    lanes = scope.axes[-1].block.name
    return lanes.isdigit() and int(lanes) % LANES_TOGETHER == 0


def loaded_number(update: Update) -> Load | None:
    """The float that a state is updated with, where that is as it was loaded, or in a wider type."""
    (value, *more) = update.values
    if isinstance(value, Cast) and value.dtype.is_floating_point and value.dtype.itemsize > value.arg.dtype.itemsize:
        value = value.arg
    is_float = value.dtype.is_floating_point and value.dtype.itemsize > 1
    return value if isinstance(value, Load) and is_float and not more else None
