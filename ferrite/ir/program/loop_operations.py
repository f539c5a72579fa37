"""Operations that are loops over axes: what `Compute`, `Reduce`, `Scan`, `Sort` and `Attention` are made of.

The grammar, and what it means, is in `ferrite.ir.program.nodes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal as OneOf

from ferrite.graph import ModelLine
from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import Axis, Index

Mode = OneOf["set", "add", "mul", "amax", "amin"]
OPERATOR_OF_MODE = {"add": "add", "mul": "mul", "amax": "maximum", "amin": "minimum"}  # of scalars
Sizes = tuple[Index, ...]


@dataclass(frozen=True)
class Origin:
    """Where an operation comes from: nodes of the graph, and a line of the model."""

    nodes: tuple[str, ...] = ()
    line: ModelLine | None = None


NOWHERE = Origin()


@dataclass(frozen=True)
class Store:
    buffer: str
    coordinates: Sizes
    value: Expr
    mode: Mode = "set"


@dataclass(frozen=True)
class Destination:
    """Where one result of a reduction, scan or sort goes."""

    buffer: str
    coordinates: Sizes


@dataclass(frozen=True)
class Combine:
    """How a scan combines two states: a name, or the results as expressions over parameters, left state first."""

    name: str
    results: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Compute:
    axes: tuple[Axis, ...]
    stores: tuple[Store, ...]
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Reduce:
    """`kind` is a row of `REDUCTIONS`; a destination that is None is not wanted."""

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    kind: str
    values: tuple[Expr, ...]
    destinations: tuple[Destination | None, ...]
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Scan:
    axes: tuple[Axis, ...]
    along: Axis
    combine: Combine
    values: tuple[Expr, ...]
    destinations: tuple[Destination | None, ...]
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Sort:
    """The first key decides; destinations take the sorted keys, and last the positions they came from."""

    axes: tuple[Axis, ...]
    along: Axis
    keys: tuple[Expr, ...]
    destinations: tuple[Destination | None, ...]
    descending: bool = False
    stable: bool = False
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class BlockList:
    """Blocks of keys that a block of rows has to do with, or blocks of rows that one of keys has to do with: `count` of
    them, each at a `place` for its `entry`. In those that are `whole` every score is allowed, and nobody asks."""

    entry: Axis
    count: Expr
    place: Expr
    whole: bool = False


@dataclass(frozen=True)
class Gradients:
    """What the gradients of attention are made of, besides what attention itself is: the gradient of its result, the
    logarithm (to base 2) of each row's sum of exponentials, what is subtracted from each row's gradients of weights,
    and the gradient of the sum of products as an expression over that sum, parameter 0, and the gradient of the score,
    parameter 1."""

    result: Expr
    logarithm: Expr
    subtracted: Expr
    score: Expr


@dataclass(frozen=True)
class Attention:
    """For every row the sum of values, weighted by the softmax of the row's scores over all keys.

    `axes` are those of matrices; in the matrices of `group`, and all rows, keys and values are the same. The sum of
    products of query and key over `summed` is parameter 0 of `score`; where `allowed` does not hold, the weight is 0.
    Of what no list names in `key_blocks` nothing is allowed; with no lists at all every block is looked at.
    `block_sides`: rows and keys of a block of those lists, both 0 where there are none.

    Destinations are the result, the logarithm to base 2 of the sum of exponentials, and the greatest score in the same
    units. With `gradients` they are the gradients of query, key and value."""

    axes: tuple[Axis, ...]
    group: Axis
    rows: Axis
    keys: Axis
    summed: Axis
    columns: Axis
    query: Expr
    key: Expr
    value: Expr
    score: Expr
    allowed: Expr
    destinations: tuple[Destination | None, ...]
    block_sides: tuple[int, int] = (0, 0)
    key_blocks: tuple[BlockList, ...] = ()
    row_blocks: tuple[BlockList, ...] = ()
    gradients: Gradients | None = None
    origin: Origin = field(default=NOWHERE, compare=False)

    @property
    def lists(self) -> tuple[BlockList, ...]:
        return (*self.key_blocks, *self.row_blocks)

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        entries = (each.entry for each in self.lists)
        return (*self.axes, self.group, self.rows, self.keys, self.summed, self.columns, *entries)

    @property
    def values(self) -> tuple[Expr, ...]:
        """Every expression, in the order in which the text names them."""
        more = self.gradients
        backward = () if more is None else (more.result, more.logarithm, more.subtracted, more.score)
        listed = (value for each in self.lists for value in (each.count, each.place))
        return (self.query, self.key, self.value, self.score, self.allowed, *backward, *listed)

    def result_axes(self, number: int) -> tuple[Axis, ...]:
        """The axes that a destination differs along."""
        if self.gradients is None:
            return (*self.axes, self.group, self.rows, *((self.columns,) if number == 0 else ()))
        if number == 0:
            return (*self.axes, self.group, self.rows, self.summed)
        return (*self.axes, self.keys, self.summed if number == 1 else self.columns)

    def rebuilt(
        self,
        value: Callable[[Expr], Expr] = lambda old: old,
        axis: Callable[[Axis], Axis] = lambda old: old,
        destination: Callable[[Destination], Destination] = lambda old: old,
    ) -> Attention:
        """The same over other expressions, axes and places."""

        def listed(old: BlockList) -> BlockList:
            return BlockList(axis(old.entry), value(old.count), value(old.place), old.whole)

        more = self.gradients
        if more is not None:
            more = Gradients(*map(value, (more.result, more.logarithm, more.subtracted, more.score)))
        return replace(
            self,
            axes=tuple(map(axis, self.axes)),
            group=axis(self.group),
            rows=axis(self.rows),
            keys=axis(self.keys),
            summed=axis(self.summed),
            columns=axis(self.columns),
            query=value(self.query),
            key=value(self.key),
            value=value(self.value),
            score=value(self.score),
            allowed=value(self.allowed),
            destinations=tuple(None if each is None else destination(each) for each in self.destinations),
            key_blocks=tuple(map(listed, self.key_blocks)),
            row_blocks=tuple(map(listed, self.row_blocks)),
            gradients=more,
        )


LoopOperation = Compute | Reduce | Scan | Sort | Attention
