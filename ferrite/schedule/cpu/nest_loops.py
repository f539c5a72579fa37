"""The loops of one nest inside a row, with vectors."""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import Axis
from ferrite.ir.kernel import Accumulate, Loop, State
from ferrite.machines import Machine
from ferrite.schedule.cpu.strips import in_strips
from ferrite.schedule.cpu.vectors import vector_loop
from ferrite.schedule.fusion.accesses import likely_points, upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, collapse, cut, indices_at, nested
from ferrite.schedule.loops.memory_order import ordered_axes, vector_axis
from ferrite.schedule.loops.plain_loops import in_parts, plain_loops, summed_across, sums_floats
from ferrite.schedule.loops.statements import Parts

MAX_SUMMED_ELEMENTS = 2048  # before a sum is added to another: how far rounding errors can grow


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


def accumulated(states: Sequence[State], axes: Sequence[Axis], body: Body, machine: Machine) -> Body:
    """Loops over what is reduced. Long sums of floats are made of shorter ones."""
    if not axes:
        return (Accumulate(tuple(states), body),)
    *outer, last = axes
    loop = vector_loop(last, body, machine, "reduction")
    longest = upper_estimate(last.extent, 1 << 30)
    rounds = likely_points(outer)
    sums = sums_floats(states)
    if sums and longest > 2 * MAX_SUMMED_ELEMENTS:
        block, inside, cut_body = cut(last, MAX_SUMMED_ELEMENTS, body)
        short = Loop(inside, "reduction", cut_body, loop.lanes, loop.copies)
        return in_parts(states, [*outer, block], (short,))
    if sums and rounds * longest > 2 * MAX_SUMMED_ELEMENTS and longest >= 64:
        return in_parts(states, outer, (loop,))
    return (Accumulate(tuple(states), nested(outer, (loop,), "reduction")),)
