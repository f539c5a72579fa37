"""Statements over other axes, and loops around them: what every arrangement of loops is put together from.

for i in 64:                                    for i_j in 2048:
    for j in 32:             collapse(i, j)         y[i_j] = x[i_j]
        y[32*i + j] = x[32*i + j]
                                                for i_block in 2:
                             cut(i, 32)             for i_in in 32: ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ferrite.ir import (
    ONE,
    OPERATORS,
    ZERO,
    Axis,
    Expr,
    FloorDiv,
    Index,
    IndexValue,
    Mod,
    Op,
    Sum,
    axis,
    indices_of,
    minimum,
    nodes_of,
    rewrite_indices,
    substitute,
    with_parts,
)
from ferrite.ir.kernel import Accumulate, Let, Loop, LoopKind, Scratch, Statement, Store, Update, When, nodes_in
from ferrite.schedule.fusion.accesses import step_of

Body = tuple[Statement, ...]


def indices_at(body: Body) -> list[Index]:
    """Every index that the statements use: of loads each once, of stores twice, as they should be the easier ones."""
    loads: dict[Index, None] = {}
    stores: list[Index] = []
    for statement in body:
        match statement:
            case Store(coordinates=coordinates):
                stores += coordinates * 2
            case Loop() | Accumulate() | When():
                stores += indices_at(statement.body)
                if isinstance(statement, Loop):
                    loads[statement.axis.extent] = None
            case _:
                pass
        for item in nodes_in(statement):
            loads.update(dict.fromkeys(indices_of(item)))
    return [*loads, *stores]


def replaced(body: Body, new: dict[Axis, Index]) -> Body:
    """Statements over other axes."""
    return tuple(replaced_in(statement, new) for statement in body)


def replaced_in(statement: Statement, new: dict[Axis, Index]) -> Statement:
    match statement:
        case Let():
            return Let(statement.name, rewrite_indices(statement.value, new))
        case Update():
            return Update(statement.state, tuple(rewrite_indices(item, new) for item in statement.values))
        case Store():
            at = tuple(index_over(item, new) for item in statement.coordinates)
            return replace(statement, coordinates=at, value=rewrite_indices(statement.value, new))
        case Accumulate():
            return Accumulate(statement.states, replaced(statement.body, new))
        case When():
            return When(rewrite_indices(statement.condition, new), replaced(statement.body, new))
        case Loop():
            extent = index_over(statement.axis.extent, new)
            if extent is statement.axis.extent:
                return replace(statement, body=replaced(statement.body, new))
            shorter = axis(statement.axis.name, extent)
            return replace(statement, axis=shorter, body=replaced(statement.body, {**new, statement.axis: shorter}))
        case Scratch():
            return statement
    raise TypeError(f"no statement: {statement!r}")


def with_values(statement: Statement, new: Mapping[Expr, Expr]) -> Statement:
    """A statement with some expressions replaced by others."""

    def value(expr: Expr) -> Expr:
        rewritten: dict[Expr, Expr] = dict(new)
        for item in nodes_of(expr):
            if item not in rewritten:
                rewritten[item] = with_parts(item, rewritten.__getitem__, lambda index: index)
        return rewritten[expr]

    match statement:
        case Let():
            return Let(statement.name, value(statement.value))
        case Update():
            return Update(statement.state, tuple(map(value, statement.values)))
        case Store():
            return Store(statement.buffer, statement.coordinates, value(statement.value), statement.mode)
    return statement


def index_over(old: Index, new: dict[Axis, Index]) -> Index:
    if not old.atoms:
        return old
    found = rewrite_indices(IndexValue.intern(old, torch.int64), new)
    return found.index if isinstance(found, IndexValue) else substitute(old, new)


# --- collapsing and cutting -------------------------------------------------------------------------------------------


def collapse(
    axes: Sequence[Axis], body: Body, keep: Iterable[Axis] = (), divided: bool = False
) -> tuple[list[Axis], Body]:
    """Neighbouring axes that every index steps through as through one become one. `divided`: so may what is divided in
    an index, at the price of a division at each point."""
    kept = set(keep)
    todo = [item for item in axes if item.extent is not ONE]
    gone: dict[Axis, Index] = {item: ZERO for item in axes if item.extent is ONE}
    if gone:
        body = replaced(body, gone)
    if len(todo) < 2:
        return todo, body
    indices = [part for index in indices_at(body) for part in (linear_parts(index) if divided else [index])]
    collapsed = [todo[-1]]
    new: dict[Axis, Index] = {}
    for item in reversed(todo[:-1]):
        inside = collapsed[0]
        if item in kept or inside in kept or not joinable(item, inside, indices):
            collapsed.insert(0, item)
            continue
        both = axis(f"{item.name}_{inside.name}", item.extent * inside.extent)
        step: dict[Axis, Index] = {item: both // inside.extent, inside: both % inside.extent}
        indices = [index_over(index, step) for index in indices]
        new = {old: substitute(index, step) for old, index in new.items()} | step
        collapsed[0] = both
    return collapsed, replaced(body, new) if new else body


def linear_parts(index: Index) -> list[Index]:
    """What is divided in an index, by what, and what is left: `(i*n + j) // 8 + i*n + j` steps through `i` and `j` as
    through one axis, since both places do."""
    terms = index.terms if isinstance(index, Sum) else ((index, 1),)
    divided = [(item, factor) for item, factor in terms if isinstance(item, FloorDiv | Mod)]
    rest = index
    for item, factor in divided:
        rest = rest - item * factor
    inside = [part for item, _ in divided for each in (item.top, item.bottom) for part in linear_parts(each)]
    return [rest, *inside]


def joinable(outer: Axis, inside: Axis, indices: Sequence[Index]) -> bool:
    if inside.extent is ZERO:  # steps of zero fit each other, but nothing is divided by that extent
        return False
    for index in indices:
        far, near = step_of(index, outer), step_of(index, inside)
        if far is None or near is None or far is not near * inside.extent:
            return False
    return True


def cut(whole: Axis, size: int, body: Body) -> tuple[Axis, Axis, Body]:
    """An axis as blocks of a size, the last of them perhaps smaller: the blocks, and the places in one."""
    block = axis(f"{whole.name}_block", (whole.extent + (size - 1)) // size)
    inside = axis(f"{whole.name}_in", minimum(size, whole.extent - block * size))
    return block, inside, replaced(body, {whole: block * size + inside})


# --- making loops -----------------------------------------------------------------------------------------------------


def work_of(body: Body) -> int:
    """Work at one point, in additions."""
    seen: set[Expr] = set()
    for statement in body:
        seen.update(nodes_in(statement))
        if isinstance(statement, Loop | Accumulate | When):
            seen.update(item for inner in statement.body for item in nodes_in(inner))
    return len(body) + sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in seen)


def nested(axes: Sequence[Axis], body: Body, kind: LoopKind) -> Body:
    for item in reversed(axes):
        body = (Loop(item, kind, body),)
    return body
