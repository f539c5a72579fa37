"""The loops of one nest inside a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.ir import Local
from ferrite.ir.index import Axis
from ferrite.ir.kernel import Accumulate, Join, Loop, State, Statement
from ferrite.ir.program import Scan
from ferrite.schedule.cpu.loops import Body, collapse, cut, indices_at, nested, ordered_axes, vector_axis, vector_loop
from ferrite.schedule.cpu.machine import Machine
from ferrite.schedule.cpu.statements import Parts
from ferrite.schedule.cpu.strips import in_strips
from ferrite.schedule.fusion.accesses import likely, upper_estimate
from ferrite.schedule.fusion.nests import Nest

MAX_SUMMED_ELEMENTS = 2048  # before a sum is added to another: how far rounding errors can grow
MAX_SUMMED_ROWS = 64  # the same where every result has one state, not one per lane of some vectors


def nest_loops(nest: Nest, part: Parts, machine: Machine) -> Body:
    body: Body = tuple(part.point)
    if nest.ordered or not nest.axes:
        return plain_loops(nest, part)
    if not part.states:
        axes, body = collapse(ordered_axes(nest.axes, indices_at(body)), body)
        if not axes:
            return body
        strips = in_strips(axes, body, machine)
        if strips is not None:
            return nested(strips[0], strips[1], "serial")
        inner: Body = (vector_loop(axes[-1], body, machine),)
        return nested(axes[:-1], inner, "serial")
    best = vector_axis(nest.axes, indices_at(body))
    if best in nest.outer:
        return reduced_across(nest, part, best, machine)
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(body)), body)
    whole = accumulated(part.states, axes, body, machine) + tuple(part.after)
    outer, whole = collapse(list(nest.outer), whole)
    return nested(outer, whole, "serial")


def reduced_across(nest: Nest, part: Parts, best: Axis, machine: Machine) -> Body:
    """Reductions whose results lie side by side: a vector holds the states of several results."""
    block: Body = (*summed_across(nest, part), *part.after)
    others, block = collapse([item for item in nest.outer if item is not best], block)
    return nested(others, (vector_loop(best, block, machine),), "serial")


def summed_across(nest: Nest, part: Parts) -> Body:
    """Plain loops over what is reduced. Long sums of floats are made of shorter ones."""
    axes, body = collapse(ordered_axes(nest.reduced, indices_at(tuple(part.point))), tuple(part.point))
    longest = upper_estimate(axes[-1].extent, 1 << 30) if axes else 0
    if not sums_floats(part.states) or longest <= 4 * MAX_SUMMED_ROWS:
        return (Accumulate(tuple(part.states), nested(axes, body, "reduction")),)
    block, inside, body = cut(axes[-1], MAX_SUMMED_ROWS, body)
    return in_parts(part.states, [*axes[:-1], block], nested([inside], body, "reduction"))


def sums_floats(states: Sequence[State]) -> bool:
    return any(state.kind in ("sum", "prod") and state.dtypes[0].is_floating_point for state in states)


def accumulated(states: Sequence[State], axes: Sequence[Axis], body: Body, machine: Machine) -> Body:
    """Loops over what is reduced. Long sums of floats are made of shorter ones."""
    if not axes:
        return (Accumulate(tuple(states), body),)
    *outer, last = axes
    loop = vector_loop(last, body, machine, "reduction")
    longest = upper_estimate(last.extent, 1 << 30)
    rounds = math.prod(likely(item.extent) for item in outer)
    sums = sums_floats(states)
    if sums and longest > 2 * MAX_SUMMED_ELEMENTS:
        block, inside, cut_body = cut(last, MAX_SUMMED_ELEMENTS, body)
        short = Loop(inside, "reduction", cut_body, loop.lanes, loop.copies)
        return in_parts(states, [*outer, block], (short,))
    if sums and rounds * longest > 2 * MAX_SUMMED_ELEMENTS and longest >= 64:
        return in_parts(states, outer, (loop,))
    return (Accumulate(tuple(states), nested(outer, (loop,), "reduction")),)


def in_parts(states: Sequence[State], axes: Sequence[Axis], inner: Body) -> Body:
    """A state for every round of the axes, combined with the state of all when the round is over."""
    renamed = {name: f"{name}_part" for state in states for name in state.names}
    parts = tuple(
        State(state.kind, tuple(renamed[name] for name in state.names), state.dtypes, state.combine) for state in states
    )
    block = Accumulate(parts, tuple(with_states(statement, renamed) for statement in inner))
    combines = tuple(
        Join(
            state.names[0],
            tuple(Local.intern(renamed[name], dtype) for name, dtype in zip(state.names, state.dtypes, strict=True)),
        )
        for state in states
    )
    return (Accumulate(tuple(states), nested(axes, (block, *combines), "serial")),)


def with_states(statement: Statement, new: dict[str, str]) -> Statement:
    match statement:
        case Join():
            return Join(new.get(statement.state, statement.state), statement.values)
        case Loop():
            body = tuple(with_states(item, new) for item in statement.body)
            return Loop(statement.axis, statement.kind, body, statement.lanes, statement.copies)
    return statement


def plain_loops(nest: Nest, part: Parts) -> Body:
    """Loops one by one, in the order of the operation."""
    body: Body = tuple(part.point)
    if not part.states:
        return nested(nest.axes, body, "serial") + tuple(part.after)
    if nest.ordered:  # a scan: only along its own axis does a state go on
        along = [
            item for stage in nest.stages if isinstance(stage.operation, Scan) for item in (stage.operation.along,)
        ]
        others = [item for item in nest.axes if item not in along]
        scan = Accumulate(tuple(part.states), nested(along, body, "serial"))
        return nested(others, (scan, *part.after), "serial")
    return nested(nest.outer, (*summed_across(nest, part), *part.after), "serial")
