"""Loops around the statements of a nest: their order, which are collapsed into one, which one is made of vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ferrite.ir import OPERATORS, Expr, IndexValue, Op, indices_of, nodes_of, rewrite_indices, with_parts
from ferrite.ir.index import ONE, ZERO, Axis, Index, Number, axis, minimum, substitute
from ferrite.ir.kernel import Accumulate, Join, Let, Loop, LoopKind, Scratch, Statement, Store, When, nodes_in
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.fusion.accesses import UNKNOWN_EXTENT, axes_in, likely, step_of

Body = tuple[Statement, ...]
ENOUGH_FOR_VECTORS = 8  # elements of an axis: a longer one is no better a choice for vectors


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
        case Join():
            return Join(statement.state, tuple(rewrite_indices(item, new) for item in statement.values))
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
        case Join():
            return Join(statement.state, tuple(map(value, statement.values)))
        case Store():
            return Store(statement.buffer, statement.coordinates, value(statement.value), statement.mode)
    return statement


def index_over(old: Index, new: dict[Axis, Index]) -> Index:
    if not old.atoms:
        return old
    found = rewrite_indices(IndexValue.intern(old, torch.int64), new)
    return found.index if isinstance(found, IndexValue) else substitute(old, new)


# --- order and collapsing ---------------------------------------------------------------------------------------------


def ordered_axes(axes: Sequence[Axis], indices: Sequence[Index], fixed: Axis | None = None) -> list[Axis]:
    """Axes from the slowest to the fastest in memory: by their steps in what is touched, the vector axis last."""
    best = fixed if fixed is not None else vector_axis(axes, indices)

    def reach(item: Axis) -> int:
        steps = [step for index in indices if (step := step_of(index, item)) is not None and step is not ZERO]
        return max((abs(likely(step, 1 << 30)) for step in steps), default=0)

    order = {item: place for place, item in enumerate(axes)}
    return sorted(axes, key=lambda item: (item is best, -reach(item), order[item]))


def vector_axis(axes: Sequence[Axis], indices: Sequence[Index]) -> Axis | None:
    """The axis along which most elements lie side by side; of equals the longest, then the last. One that is shorter
    than a vector counts for the part that it fills."""
    score = {item: 0 for item in axes if item.extent is not ONE}
    for index in indices:
        used = axes_in(index)
        weight = math.prod(min(likely(item.extent), UNKNOWN_EXTENT) for item in score if item in used)
        for item in used:
            if item in score and step_of(index, item) is ONE:
                score[item] += weight * min(likely(item.extent), ENOUGH_FOR_VECTORS)
    ranked = sorted(score, key=lambda item: (score[item], min(likely(item.extent), UNKNOWN_EXTENT), axes.index(item)))
    return ranked[-1] if ranked else None


def collapse(axes: Sequence[Axis], body: Body, keep: Iterable[Axis] = ()) -> tuple[list[Axis], Body]:
    """Neighbouring axes that every index steps through as through one become one."""
    kept = set(keep)
    todo = [item for item in axes if item.extent is not ONE]
    gone: dict[Axis, Index] = {item: ZERO for item in axes if item.extent is ONE}
    if gone:
        body = replaced(body, gone)
    if len(todo) < 2:
        return todo, body
    indices = indices_at(body)
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


def joinable(outer: Axis, inside: Axis, indices: Sequence[Index]) -> bool:
    if inside.extent is ZERO:  # steps of zero fit each other, but nothing is divided by that extent
        return False
    for index in indices:
        far, near = step_of(index, outer), step_of(index, inside)
        if far is None or near is None or far is not near * inside.extent:
            return False
    return True


def cut(item: Axis, size: int, body: Body) -> tuple[Axis, Axis, Body]:
    """An axis as blocks of a size, the last of them perhaps smaller: the blocks, and the places in one."""
    block = axis(f"{item.name}_block", (item.extent + (size - 1)) // size)
    inside = axis(f"{item.name}_in", minimum(size, item.extent - block * size))
    return block, inside, replaced(body, {item: block * size + inside})


# --- making loops -----------------------------------------------------------------------------------------------------


def work_of(body: Body) -> int:
    """Work at one point, in additions."""
    seen: set[Expr] = set()
    for statement in body:
        seen.update(nodes_in(statement))
        if isinstance(statement, Loop | Accumulate | When):
            seen.update(item for inner in statement.body for item in nodes_in(inner))
    return len(body) + sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in seen)


def types_of(body: Body) -> set[torch.dtype]:
    """The types that are computed with; integers that only index do not count."""
    found: set[torch.dtype] = set()
    for statement in body:
        for item in nodes_in(statement):
            if not isinstance(item, IndexValue) and item.dtype is not torch.bool:
                found.add(item.dtype)
        if isinstance(statement, Loop | Accumulate | When):
            found |= types_of(statement.body)
    return found


def unrolling(body: Body, work: int) -> int:
    """How many vectors side by side: enough to keep the units busy, few enough for the registers."""
    if work <= 16:
        return 4
    return 2 if work <= 60 else 1


def lanes_for(body: Body, machine: Machine) -> int:
    """Elements of a vector: as many as a register holds of what most is computed with. Wider types take several."""
    types = types_of(body)
    floats = {dtype for dtype in types if dtype.is_floating_point}
    if floats:
        return machine.vector_bytes // max(min(dtype.itemsize for dtype in floats), 4)
    return machine.lanes(*types)


def vector_loop(item: Axis, body: Body, machine: Machine, kind: LoopKind = "vector") -> Loop:
    lanes = lanes_for(body, machine)
    copies = unrolling(body, work_of(body))
    if kind == "reduction":
        copies = max(copies, 2)  # one addition waits for the other: more than one must be under way
    count = item.extent
    if isinstance(count, Number):
        while lanes > 1 and count.value < lanes:
            lanes //= 2
        while copies > 1 and count.value < lanes * copies:
            copies //= 2
    return Loop(item, kind, body, lanes, copies)


def nested(axes: Sequence[Axis], body: Body, kind: LoopKind) -> Body:
    for item in reversed(axes):
        body = (Loop(item, kind, body),)
    return body


def rows_at_once(body: Body, machine: Machine, points: int) -> int:
    """How many rows a thread should have at least, so that waking it pays."""
    return max(math.ceil(machine.grain / max(points, 1)), 1)


def shared(axes: Sequence[Axis], body: Body, work: int, machine: Machine) -> Body:
    """Loops that threads share; a thread gets several rounds of the innermost where one is little work."""
    if not axes:
        return body
    (inner,) = nested(axes[-1:], body, "parallel")
    assert isinstance(inner, Loop)
    copies = rows_at_once(body, machine, work)
    loop = Loop(inner.axis, "parallel", inner.body, copies=copies)
    return nested(axes[:-1], (loop,), "parallel")
