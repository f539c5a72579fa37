"""Loops that end where what is reduced ends.

A reduction in pieces goes through equal ones, the last of which may reach beyond the end. What lies there is taken for
a value that changes nothing:

    for i in reduction(size):                           for i in reduction(min(size, max(n - size*piece, 0))):
        sum.update(masked(size*piece + i < n,     =>        sum.update(x[size*piece + i])
                          x[size*piece + i], 0))

A loop that ends there asks nothing of its elements but what every loop over blocks does, and what is the same for all
lanes of another dimension is loaded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ferrite.ir import ZERO, Axis, Expr, Index, IndexValue, Masked, Op, Sum, axis, maximum, minimum
from ferrite.ir.kernel import Accumulate, Loop, Statement, Update, When
from ferrite.schedule.loops.axes import Body, replaced
from ferrite.schedule.loops.reductions import SPLIT_KINDS, neutral_value


def with_ends(body: Body, kinds: Mapping[str, str] | None = None, lanes: frozenset[Axis] = frozenset()) -> Body:
    """`kinds`: of the states around, by their first names; `lanes`: axes that have several values at once there, so
    that a loop cannot end where one of them says."""
    return tuple(ended(statement, kinds or {}, lanes) for statement in body)


def ended(statement: Statement, kinds: Mapping[str, str], lanes: frozenset[Axis]) -> Statement:
    match statement:
        case Accumulate():
            here = {state.names[0]: state.kind for state in statement.states}
            return replace(statement, body=with_ends(statement.body, {**kinds, **here}, lanes))
        case Loop(kind="reduction") if (end := end_of(statement, kinds)) is not None and lanes.isdisjoint(end.atoms):
            shorter = axis(statement.axis.name, minimum(statement.axis.extent, maximum(end, ZERO)))
            body = tuple(replace(each, values=(each.values[0].value,)) for each in statement.body)  # type: ignore
            return replace(statement, axis=shorter, body=replaced(body, {statement.axis: shorter}))
        case Loop():
            within = lanes | {statement.axis} if statement.lanes > 1 else lanes
            return replace(statement, body=with_ends(statement.body, kinds, within))
        case When():
            return replace(statement, body=with_ends(statement.body, kinds, lanes))
    return statement


def end_of(loop: Loop, kinds: Mapping[str, str]) -> Index | None:
    """Where all that is updated in a loop begins to change nothing; None where that is not so."""
    ends = {end_of_update(statement, loop.axis, kinds) for statement in loop.body}
    return ends.pop() if len(ends) == 1 else None


def end_of_update(statement: Statement, along: Axis, kinds: Mapping[str, str]) -> Index | None:
    if not isinstance(statement, Update) or kinds.get(statement.state) not in SPLIT_KINDS:
        return None
    (value,) = statement.values
    if not isinstance(value, Masked) or value.other != neutral_value(kinds[statement.state], value.dtype):
        return None
    return end_of_condition(value.mask, along)


def end_of_condition(condition: Expr, along: Axis) -> Index | None:
    """Up to where it holds, if it is that a place, one further for each step of an axis, is below some other."""
    if not isinstance(condition, Op) or condition.name != "lt":
        return None
    left, right = condition.operands
    if not isinstance(left, IndexValue) or not isinstance(right, IndexValue):
        return None
    end = right.index - left.index + along
    moves = isinstance(left.index, Sum) and (along, 1) in left.index.terms
    return end if moves and along not in end.atoms else None
