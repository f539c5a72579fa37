"""The loops of one nest inside a row one by one, without vectors: those that stand inside of vectors or lanes of rows.

Long sums of floats are made of shorter ones, so that rounding errors do not grow with the length.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import Axis, Local
from ferrite.ir.kernel import Accumulate, Loop, State, Statement, Update
from ferrite.ir.program import Scan
from ferrite.schedule.fusion.accesses import upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, collapse, cut, indices_at, nested
from ferrite.schedule.loops.memory_order import ordered_axes
from ferrite.schedule.loops.statements import Parts

MAX_SUMMED_ROWS = 64  # of one state, before a sum is added to another: how far rounding errors can grow


def plain_loops(nest: Nest, part: Parts) -> Body:
    """Loops one by one, in the order of the operation."""
    body: Body = tuple(part.point)
    if not part.states:
        return nested(nest.axes, body, "serial") + tuple(part.after)
    if nest.ordered:  # a scan: only along its own axis does a state go on
        along = [
            item for member in nest.members if isinstance(member.operation, Scan) for item in (member.operation.along,)
        ]
        others = [item for item in nest.axes if item not in along]
        scan = Accumulate(tuple(part.states), nested(along, body, "serial"))
        return nested(others, (scan, *part.after), "serial")
    return nested(nest.outer, (*summed_across(nest, part), *part.after), "serial")


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


def in_parts(states: Sequence[State], axes: Sequence[Axis], inner: Body) -> Body:
    """A state for every round of the axes, combined with the state of all when the round is over."""
    renamed = {name: f"{name}_part" for state in states for name in state.names}
    parts = tuple(
        State(state.kind, tuple(renamed[name] for name in state.names), state.dtypes, state.combine) for state in states
    )
    block = Accumulate(parts, tuple(with_states(statement, renamed) for statement in inner))
    combines = tuple(
        Update(
            state.names[0],
            tuple(Local.intern(renamed[name], dtype) for name, dtype in zip(state.names, state.dtypes, strict=True)),
        )
        for state in states
    )
    return (Accumulate(tuple(states), nested(axes, (block, *combines), "serial")),)


def with_states(statement: Statement, new: dict[str, str]) -> Statement:
    match statement:
        case Update():
            return Update(new.get(statement.state, statement.state), statement.values)
        case Loop():
            body = tuple(with_states(item, new) for item in statement.body)
            return Loop(statement.axis, statement.kind, body, statement.lanes, statement.copies)
    return statement
