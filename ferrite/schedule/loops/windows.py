"""Reductions of a few elements, as pooling has them, written out: vectors are made of results.

    for i in vector(64):                                    for i in vector(64):
        with sum as s:                                          s0 = 0 + x[2*i]
            for k in reduction(2): s.update(x[2*i + k])  =>     s = s0 + x[2*i + 1]
        y[i] = s                                                y[i] = s

What is masked at the edges of an image then has conditions on one axis alone, at which loops are parted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from ferrite.ir import STATES, Axis, Expr, Index, Load, Local, Number, Op, nodes_of, number, op, params, with_parts
from ferrite.ir.kernel import Let, State, Statement, Update, nodes_in, walk
from ferrite.schedule.fusion.accesses import axes_in, upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, replaced, with_values
from ferrite.schedule.loops.statements import Parts

MAX_WINDOW_ELEMENTS = 32  # that are written out one by one


def is_window(nest: Nest, part: Parts, most: int = MAX_WINDOW_ELEMENTS) -> bool:
    """Whether so few elements are reduced that they can be written out."""
    if not part.states or nest.ordered or nest.outer:
        return False
    if not all(isinstance(item, Let | Update) for item in part.point):
        return False
    return is_short([item.extent for item in nest.axes], most)


def is_short(extents: Sequence[Index], most: int = MAX_WINDOW_ELEMENTS) -> bool:
    """Whether a reduction over axes of these extents is of a few elements."""
    sizes = [size.value for size in extents if isinstance(size, Number)]
    return len(sizes) == len(extents) and math.prod(sizes) <= most


def written_out(nest: Nest, part: Parts) -> Body:
    states = {state.names[0]: state for state in part.states}
    so_far = {name: list(STATES[state.kind].begin(state.dtypes)) for name, state in states.items()}
    found: list[Statement] = []
    places = itertools.product(*(range(upper_estimate(item.extent, 0)) for item in nest.reduced))
    for count, place in enumerate(places):
        at: dict[Axis, Index] = {item: number(value) for item, value in zip(nest.reduced, place, strict=True)}
        renamed: dict[Expr, Expr] = {}
        for statement in replaced(tuple(part.point), at):
            statement = with_values(statement, renamed)
            if isinstance(statement, Let):
                name = f"{statement.name}_{count}"
                renamed[Local.intern(statement.name, statement.value.dtype)] = Local.intern(name, statement.value.dtype)
                found.append(Let(name, statement.value))
                continue
            assert isinstance(statement, Update)
            state = states[statement.state]
            if state.kind == "sum" and is_product(statement.values[0]):
                results: list[Expr] = [
                    op("fma", *statement.values[0].args, *so_far[statement.state])
                ]  # as a loop adds it
            else:
                values = [
                    Local.intern(f"{statement.state}_of_{count}_{number}", value.dtype)
                    for number, value in enumerate(statement.values)
                ]
                found += [Let(local.name, value) for local, value in zip(values, statement.values, strict=True)]
                results = combined(state, so_far[statement.state], tuple(values), count == 0)
            names = [f"{name}_{count}" for name in state.names]
            found += [Let(name, result) for name, result in zip(names, results, strict=True)]
            so_far[statement.state] = [
                Local.intern(name, dtype) for name, dtype in zip(names, state.dtypes, strict=True)
            ]
    for state in part.states:
        found += [Let(name, value) for name, value in zip(state.names, so_far[state.names[0]], strict=True)]
    return (*found, *part.after)


def share_weights(body: Body, row: Axis, column: Axis) -> bool:
    """Whether windows along a row, written out, read something that is another for each column, and the same for all of
    them: where they are computed at once, it is loaded once."""
    for statement in walk(body):
        for item in nodes_in(statement):
            if isinstance(item, Load):
                axes = frozenset[Axis]().union(*map(axes_in, item.coordinates))
                if column in axes and row not in axes:
                    return True
    return False


def used(body: Body) -> Body:
    """The statements without values that nothing asks for: pooling may want the greatest value, and not its place."""
    wanted: set[str] = set()
    found: list[Statement] = []
    for statement in reversed(body):
        if not isinstance(statement, Let) or statement.name in wanted:
            found.append(statement)
            inside = (item for each in walk((statement,)) for item in nodes_in(each))
            wanted.update(item.name for item in inside if isinstance(item, Local))
    return tuple(reversed(found))


def is_product(value: Expr) -> bool:
    """Whether it is a product that may be added without being rounded first."""
    return isinstance(value, Op) and value.name == "mul" and value.dtype in (torch.float32, torch.float64)


def combined(state: State, left: list[Expr], values: tuple[Expr, ...], first: bool) -> list[Expr]:
    kind, types = STATES[state.kind], state.dtypes
    lifted = [applied(item, values) for item in kind.lift(types)]
    if kind.in_order is not None and first:
        return lifted  # what comes after has to be better, and nothing is better than what a state begins with
    combine = kind.in_order or kind.combine
    return [applied(item, (*left, *lifted)) for item in combine(types)]


def applied(root: Expr, values: tuple[Expr, ...]) -> Expr:
    """An expression over parameters with values in their place."""
    rewritten: dict[Expr, Expr] = dict(zip(params(tuple(value.dtype for value in values)), values, strict=True))
    for item in nodes_of(root):
        if item not in rewritten:
            rewritten[item] = with_parts(item, rewritten.__getitem__, lambda index: index)
    return rewritten[root]
