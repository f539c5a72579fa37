"""Attention as lines of Triton source: a block of rows goes through blocks of keys, with running maxima.

Weights are powers of two: a score is multiplied by the logarithm of e first. Of each row the greatest score so far,
the sum of weights relative to it, and the sum of values weighted by them are kept; where a greater score comes, both
sums are made smaller. A row without any allowed score has a sum of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ferrite.codegen.triton.indices import is_narrow, widened
from ferrite.codegen.triton.launch import power_of_two
from ferrite.codegen.triton.module import BlockAxis, Mask, Module, Scope, Value
from ferrite.codegen.triton.operators import converted
from ferrite.codegen.triton.stores import Stores
from ferrite.codegen.triton.values import Evaluation
from ferrite.graph import HALVES
from ferrite.ir import (
    ZERO,
    Axis,
    Const,
    Data,
    Expr,
    Load,
    Local,
    Masked,
    Number,
    Op,
    Param,
    cast,
    nodes_of,
    number,
    rewrite_loads,
)
from ferrite.ir.kernel import Attend, Store
from ferrite.ir.program import Attention, BlockList, Destination
from ferrite.machines import MATRIX_UNIT_SIDE

LOG2_E = 1.4426950408889634
NOTHING = 'float("-inf")'


class StatementPrinter(Protocol):
    """What prints the statements around."""

    module: Module
    stores: Stores
    types: dict[str, torch.dtype]  # of pointers

    def number(self, axis: Axis, text: str) -> None: ...


def print_attention(printer: StatementPrinter, statement: Attend, scope: Scope) -> None:
    """`scope`: one dimension, of rows, or of keys where their gradients are wanted."""
    if statement.operation.gradients is None:
        _Forward(printer, statement, scope).print()
    elif statement.is_by_keys:
        _KeyGradients(printer, statement, scope).print()
    else:
        _RowGradients(printer, statement, scope).print()


class _Attention:
    """`mine`: the axis that a program has a block of; `other`: the one that it goes through."""

    def __init__(self, printer: StatementPrinter, statement: Attend, scope: Scope) -> None:
        self.printer, self.statement, self.scope = printer, statement, scope
        self.module: Module = printer.module
        self.one: Attention = statement.operation
        by_keys = statement.is_by_keys
        self.mine, self.other = (self.one.keys, self.one.rows) if by_keys else (self.one.rows, self.one.keys)
        self.mine_lanes, self.lanes = scope.axes[0].block.most, statement.lanes
        self.base = self.module.bases[self.mine] or "0"
        self.places: dict[Axis, str] = {}  # lanes of an axis, in one dimension
        self.bounded: dict[Axis, str] = {}  # which of them are inside, where some may not be
        self.take_mine()
        self.dtype = self.one.query.dtype

    # --- lanes and blocks ---------------------------------------------------------------------------------------------

    def take_mine(self) -> None:
        value, _ = self.module.atoms[self.mine]
        self.places[self.mine] = value.text
        if self.scope.masks:
            self.bounded[self.mine] = self.scope.masks[0].value.text

    def take(self, axis: Axis, base: str, lanes: int, inside: bool) -> None:
        """Lanes of an axis from a place on. `inside`: whether all of them are."""
        arange = f"tl.arange(0, {lanes})"
        text = f"{base} + {arange}" if base else arange
        self.places[axis] = self.module.set(axis.name, text if is_narrow(axis) else widened(text))
        self.bounded.pop(axis, None)
        if not inside:
            extent, _ = Evaluation(self.module, Scope()).index(axis.extent)
            self.bounded[axis] = self.module.set("mask", f"{self.places[axis]} < {extent.text}")

    def take_whole(self, axis: Axis) -> None:
        """All of a short axis, which is one block."""
        assert isinstance(axis.extent, Number)
        lanes = self.width(axis)
        self.take(axis, "", lanes, inside=axis.extent.value == lanes)

    def width(self, axis: Axis) -> int:
        assert isinstance(axis.extent, Number)
        return max(power_of_two(axis.extent.value), MATRIX_UNIT_SIDE)

    def size(self, axis: Axis) -> int:
        if axis is self.mine:
            return self.mine_lanes
        return self.lanes if axis is self.other else self.width(axis)

    def over(self, *axes: Axis) -> Scope:
        """A block of these dimensions."""
        blocks, masks = [], []
        for dim, axis in enumerate(axes):
            shown = self.places[axis] if dim == 0 else f"{self.places[axis]}[None, :]"
            self.module.bind(axis, Value(shown, frozenset([dim])), not is_narrow(axis))
            blocks.append(BlockAxis(axis, self.module.fixed(self.size(axis)), False))
            if axis in self.bounded:
                text = self.bounded[axis] if dim == 0 else f"{self.bounded[axis]}[None, :]"
                masks.append(Mask(Value(text, frozenset([dim])), bounds=dim))
        return Scope(tuple(blocks), tuple(masks))

    def block(self, value: Expr, *axes: Axis) -> str:
        """An expression over these dimensions, zero beyond their ends."""
        scope = self.over(*axes)
        found = Evaluation(self.module, scope).value(value)
        text = found.at(len(axes))
        return text if found.dims == scope.dims else f"tl.broadcast_to({text}, {scope.shape()})"

    def column(self, value: Expr) -> str:
        """A number for each row, as a block over rows and keys has it: along its second dimension where these are."""
        if self.mine is self.one.rows:
            return f"{self.block(value, self.one.rows)}[:, None]"
        return Evaluation(self.module, self.over(self.mine, self.other)).value(value).text

    def zeros(self, wish: str, *sizes: int) -> str:
        return self.module.set(wish, f"tl.full([{', '.join(map(str, sizes))}], 0.0, tl.float32)")

    def multiplied(self, left: str, right: str, total: str) -> str:
        function = "multiply_add" if self.dtype in HALVES else "add_product"
        self.module.needs(function)
        return f"{function}({left}, {right}, {total})"

    def reduced(self, block: str, function: str) -> str:
        """What the rows of a block come to."""
        self.module.needs(function)
        return f"tl.reduce({block}, 1, {function})"

    def power(self, exponent: str) -> str:
        """A power of two; relative to the greatest of a row, so that those which are nearly zero may be."""
        self.module.needs("quick_exp2")
        return f"quick_exp2({exponent})"

    def narrow(self, text: str) -> str:
        return converted(self.module.needs, text, torch.float32, self.dtype)

    # --- loops over the other axis ------------------------------------------------------------------------------------

    def go_through(self, lists: Sequence[BlockList], body: Callable[[bool], None]) -> None:
        """`body`: what a block of the other axis does; whether scores in it must be asked about."""
        if not self.one.lists:
            extent, _ = Evaluation(self.module, Scope()).index(self.other.extent)
            inside = self.other.extent % number(self.lanes) is ZERO
            with self.steps(f"0, {extent.text}, {self.lanes}") as start:
                self.take(self.other, start, self.lanes, inside)
                body(True)
            return
        for each in lists:
            with self.listed(each):
                body(not each.whole)

    @contextmanager
    def listed(self, each: BlockList) -> Iterator[None]:
        """A loop over the blocks of a list, in steps of so many lanes. What memory says is kept inside its bounds."""
        rows, keys = self.one.block_sides
        side = rows if self.other is self.one.rows else keys
        many = side // self.lanes
        evaluation = Evaluation(self.module, Scope())
        self.module.bind(self.mine, Value(self.module.set("first", self.base)), not is_narrow(self.mine))
        count = evaluation.value(each.count).text
        most, _ = evaluation.index(each.entry.extent)
        count = self.module.set("count", f"tl.minimum({count}, {most.text})")
        last, _ = evaluation.index((self.other.extent + (side - 1)) // side - 1)
        with self.steps(f"0, {count} * {many}" if many > 1 else f"0, {count}") as step:
            self.module.bind(each.entry, Value(f"({step} // {many})" if many > 1 else step), False)
            place = Evaluation(self.module, Scope()).value(each.place).text
            place = self.module.set("place", f"tl.minimum(tl.maximum({place}, 0), {last.text})")
            start = f"{place} * {side} + {step} % {many} * {self.lanes}" if many > 1 else f"{place} * {side}"
            inside = self.other.extent % number(side) is ZERO
            self.take(self.other, start, self.lanes, inside)
            yield

    @contextmanager
    def steps(self, bounds: str) -> Iterator[str]:
        name = self.module.fresh("step")
        self.module.known.clear()
        with self.module.indented(f"for {name} in tl.range({bounds}, num_stages={self.statement.copies}):"):
            yield name
        self.module.known.clear()

    # --- scores -------------------------------------------------------------------------------------------------------

    @property
    def score_axes(self) -> tuple[Axis, Axis]:
        return self.mine, self.other

    def function(self, value: Expr, *params: str) -> str:
        """An expression over a block of scores, of which these are the parameters."""
        scope = self.over(*self.score_axes)
        given = [Value(each, scope.dims) for each in params]
        with self.quick_functions():
            found = Evaluation(self.module, scope, given).value(value)
        text = found.at(2)
        return text if found.dims == scope.dims else f"tl.broadcast_to({text}, {scope.shape()})"

    @contextmanager
    def quick_functions(self) -> Iterator[None]:
        """With factors of 16 bits, functions may be off by a millionth of their result: so a score below 1000 changes
        its weight by less than a thousandth, which is rounded to 16 bits before it is multiplied."""
        before = self.module.quick
        self.module.quick = before or self.dtype in HALVES
        yield
        self.module.quick = before

    def read_early(self, value: Expr) -> Expr:
        """An expression over a block of scores, with what it reads at their places in values. Triton gives numbers of
        rows the layout of the first block that they come from: were that what is read, and not the sums of products
        that come after, all scores would go through shared memory, to be reduced in the layout of loads."""
        is_checked = any(isinstance(each, Data) for each in value.atoms)
        if is_checked or any(isinstance(each, Masked) for each in nodes_of(value)):
            return value
        evaluation = Evaluation(self.module, self.over(*self.score_axes))

        def early(load: Load) -> Expr:
            if not set(self.score_axes) <= load.atoms:
                return load
            found = evaluation.value(load)
            self.module.name_value(found.text, found)
            return Local.intern(found.text, load.dtype)

        return rewrite_loads(value, early)

    def allowed(self, allowed: Expr | None) -> str | None:
        """Where a score counts; None: everywhere. Rows beyond the end are never written."""
        scope = self.over(*self.score_axes)
        counted = [mask.value for mask in scope.masks if mask.bounds == 1]
        evaluation = Evaluation(self.module, scope)
        if allowed is not None and allowed != TRUE:
            counted.append(evaluation.value(allowed))
        if not counted:
            return None
        return evaluation.both(*counted).at(2)

    def scores(self, left: str, right: str) -> str:
        """Sums of products of the rows of two blocks."""
        zeros = f"tl.full([{self.mine_lanes}, {self.lanes}], 0.0, tl.float32)"
        return self.multiplied(left, f"tl.trans({right})", zeros)

    def powers(self, products: str, score: Expr) -> tuple[str, float]:
        """Scores as exponents of 2, up to a factor."""
        factor = factor_of(score)
        if factor is not None:
            return products, factor * LOG2_E
        return self.module.set("scores", f"{self.function(score, products)} * {LOG2_E!r}"), 1.0

    def store(self, wish: str, text: str, target: Destination | None, *axes: Axis) -> None:
        if target is None:
            return
        name = self.module.set(wish, text)
        scope = self.over(*axes)
        self.module.name_value(name, Value(name, scope.dims))
        dtype = self.printer.types[target.buffer]
        value = cast(Local.intern(name, torch.float32), dtype)
        self.printer.stores.store(Store(target.buffer, target.coordinates, value), scope)


class _Forward(_Attention):
    def print(self) -> None:
        one, module = self.one, self.module
        self.take_whole(one.summed)
        self.take_whole(one.columns)
        query = module.set("query", self.block(one.query, one.rows, one.summed))
        self.greatest = module.set("greatest", f"tl.full([{self.mine_lanes}], {NOTHING}, tl.float32)")
        self.total = self.zeros("total", self.mine_lanes)
        self.result = self.zeros("result", self.mine_lanes, self.width(one.columns))
        self.go_through(one.key_blocks, lambda asked: self.step(query, asked))
        divisor = module.set("divisor", f"tl.where({self.total} == 0.0, 1.0, {self.total})")
        result, logarithm, greatest = one.destinations
        self.store("quotient", f"{self.result} / {divisor}[:, None]", result, one.rows, one.columns)
        self.store("logarithm", f"{self.greatest} + tl.log2({self.total})", logarithm, one.rows)
        self.store("highest", self.greatest, greatest, one.rows)

    def step(self, query: str, asked: bool) -> None:
        one, module = self.one, self.module
        score, asked_of = self.read_early(one.score), self.read_early(one.allowed) if asked else None
        key = module.set("key", self.block(one.key, one.keys, one.summed))
        products = module.set("products", self.scores(query, key))
        scores, factor = self.powers(products, score)
        allowed = self.allowed(asked_of)
        if allowed is not None:
            worst = NOTHING if factor > 0 else 'float("inf")'
            scores = module.set("scores", f"tl.where({allowed}, {scores}, {worst})")
        times = "" if factor == 1.0 else f" * {factor!r}"
        most = self.reduced(scores, "larger" if factor > 0 else "smaller")
        higher = module.set("higher", f"tl.maximum({self.greatest}, {most}{times})")
        safe = module.set("safe", f"tl.where({higher} == {NOTHING}, 0.0, {higher})")
        shrunk = module.set("shrunk", self.power(f"{self.greatest} - {safe}"))
        weights = module.set("weights", self.power(f"{scores}{times} - {safe}[:, None]"))
        module.line(f"{self.total} = {self.total} * {shrunk} + {self.reduced(weights, 'added')}")
        module.line(f"{self.result} = {self.result} * {shrunk}[:, None]")
        value = self.block(one.value, one.keys, one.columns)
        module.line(f"{self.result} = {self.multiplied(self.narrow(weights), value, self.result)}")
        module.line(f"{self.greatest} = {higher}")


class _Gradients(_Attention):
    def weights(self, products: str, score: Expr, logarithm: str, allowed: str | None) -> str:
        """The weights of forward, once more. In a row without any every score is not allowed, or minus infinity."""
        scores, factor = self.powers(products, score)
        times = "" if factor == 1.0 else f" * {factor!r}"
        text = self.power(f"{scores}{times} - {logarithm}")
        return self.module.set("weights", text if allowed is None else f"tl.where({allowed}, {text}, 0.0)")

    def gradients(self, products: str, weights: str, outer: str, subtracted: str, allowed: str | None) -> str:
        """Of the sums of products."""
        more = self.one.gradients
        assert more is not None
        text = self.module.set("gradients", f"{weights} * ({outer} - {subtracted})")
        if factor_of(more.score, GIVEN) is None:
            text = self.function(more.score, products, text)
        if allowed is not None:
            text = f"tl.where({allowed}, {text}, 0.0)"
        return self.module.set("narrow", self.narrow(self.module.set("gradients", text)))

    def whole(self, total: str) -> str:
        """A sum of gradients times a factor, which their sum is multiplied by."""
        assert self.one.gradients is not None
        factor = factor_of(self.one.gradients.score, GIVEN)
        return total if factor in (None, 1.0) else f"{total} * {factor!r}"

    def logarithm(self) -> str:
        assert self.one.gradients is not None
        found = self.module.set("logarithm", self.column(self.one.gradients.logarithm))
        return self.module.set("logarithm", f"tl.where({found} == {NOTHING}, 0.0, {found})")

    def subtracted(self) -> str:
        assert self.one.gradients is not None
        return self.module.set("subtracted", self.column(self.one.gradients.subtracted))


class _RowGradients(_Gradients):
    def print(self) -> None:
        one, module, more = self.one, self.module, self.one.gradients
        assert more is not None
        self.take_whole(one.summed)
        self.take_whole(one.columns)
        query = module.set("query", self.block(one.query, one.rows, one.summed))
        outer = module.set("outer", self.block(more.result, one.rows, one.columns))
        logarithm, subtracted = self.logarithm(), self.subtracted()
        total = self.zeros("total", self.mine_lanes, self.width(one.summed))

        def step(asked: bool) -> None:
            key = module.set("key", self.block(one.key, one.keys, one.summed))
            value = module.set("value", self.block(one.value, one.keys, one.columns))
            score, asked_of = self.read_early(one.score), self.read_early(one.allowed) if asked else None
            products = module.set("products", self.scores(query, key))
            allowed = self.allowed(asked_of)
            weights = self.weights(products, score, logarithm, allowed)
            of_weights = module.set("of_weights", self.scores(outer, value))
            found = self.gradients(products, weights, of_weights, subtracted, allowed)
            module.line(f"{total} = {self.multiplied(found, key, total)}")

        self.go_through(one.key_blocks, step)
        self.store("result", self.whole(total), one.destinations[0], one.rows, one.summed)


class _KeyGradients(_Gradients):
    def print(self) -> None:
        one, module, more = self.one, self.module, self.one.gradients
        assert more is not None
        self.take_whole(one.summed)
        self.take_whole(one.columns)
        key = module.set("key", self.block(one.key, one.keys, one.summed))
        value = module.set("value", self.block(one.value, one.keys, one.columns))
        of_keys = self.zeros("of_keys", self.mine_lanes, self.width(one.summed))
        of_values = self.zeros("of_values", self.mine_lanes, self.width(one.columns))

        def step(asked: bool) -> None:
            query = module.set("query", self.block(one.query, one.rows, one.summed))
            outer = module.set("outer", self.block(more.result, one.rows, one.columns))
            logarithm, subtracted = self.logarithm(), self.subtracted()
            score, asked_of = self.read_early(one.score), self.read_early(one.allowed) if asked else None
            products = module.set("products", self.scores(key, query))
            allowed = self.allowed(asked_of)
            weights = self.weights(products, score, logarithm, allowed)
            module.line(f"{of_values} = {self.multiplied(self.narrow(weights), outer, of_values)}")
            of_weights = module.set("of_weights", self.scores(value, outer))
            found = self.gradients(products, weights, of_weights, subtracted, allowed)
            module.line(f"{of_keys} = {self.multiplied(found, query, of_keys)}")

        if one.group.extent is number(1):
            self.printer.number(one.group, "0")
            self.go_through(one.row_blocks, step)
        else:
            name = module.fresh(one.group.name)
            extent, _ = Evaluation(module, Scope()).index(one.group.extent)
            with module.indented(f"for {name} in range(0, {extent.text}):"):
                self.printer.number(one.group, name)
                self.go_through(one.row_blocks, step)
            module.known.clear()
        self.store("result", self.whole(of_keys), one.destinations[1], one.keys, one.summed)
        self.store("result", of_values, one.destinations[2], one.keys, one.columns)


TRUE = Const.intern(torch.bool, 1)
PRODUCTS, GIVEN = (Param.intern(number, torch.float32) for number in (0, 1))


def factor_of(score: Expr, of: Expr = PRODUCTS) -> float | None:
    """What one parameter is multiplied by, where that is all of an expression."""
    if score is of:
        return 1.0
    if not isinstance(score, Op) or score.name != "mul":
        return None
    left, right = score.operands
    left, right = (right, left) if isinstance(left, Const) else (left, right)
    if left is not of or not isinstance(right, Const) or not isinstance(right.value, (int, float)):
        return None
    return float(right.value) or None
