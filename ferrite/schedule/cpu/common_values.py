"""What two nests of a row both compute, and is expensive, is computed once and kept in a tile of scratch.

A softmax needs the exponentials for their sum, and again for the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrite.ir import OPERATORS, Axis, Expr, Load, Local, Masked, Op, flat_extent, flat_place, nodes_of
from ferrite.ir.kernel import Let, Scratch, Statement, Store, values_of
from ferrite.machines import Machine
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import with_values
from ferrite.schedule.loops.statements import Parts


def shared_tiles(nests: Sequence[Nest], parts: Sequence[Parts], room: int, machine: Machine) -> list[Scratch]:
    """Change the statements; the tiles they need now. `room`: bytes that tiles may take."""
    tiles: list[Scratch] = []
    for later in range(1, len(nests)):
        for earlier in range(later):
            if nests[earlier].axes != nests[later].axes or not nests[later].axes:
                continue
            if nests[earlier].ordered or nests[later].ordered:
                continue
            axes, between = set(nests[later].axes), parts[earlier : later + 1]
            for expr in common(parts[earlier], parts[later], axes, between, machine):
                size = tile_size(nests[later].axes, expr)
                if size is None or size > room:
                    continue
                room -= size
                name = f"shared{len(tiles)}"
                tiles.append(Scratch(name, expr.dtype, (flat_extent(item.extent for item in nests[later].axes),)))
                keep(parts[earlier], parts[later], expr, name, nests[later].axes)
    return tiles


def tile_size(axes: Sequence[Axis], expr: Expr) -> int | None:
    highs = [item.extent.high for item in axes]
    if any(not high for high in highs):  # not known, or nothing there
        return None
    return math.prod((high for high in highs if high is not None), start=expr.dtype.itemsize)


def common(first: Parts, second: Parts, axes: set[Axis], between: Sequence[Parts], machine: Machine) -> list[Expr]:
    """The largest expensive expressions that both compute, of memory that nothing in between writes."""
    written = {item.buffer for part in between for item in part.point if isinstance(item, Store)}
    there = {node for statement in first.point for node in nodes_everywhere(statement)}
    local = {item.name for part in (first, second) for item in part.point if isinstance(item, Let)}
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()

    def look(expr: Expr) -> None:
        stack = [expr]
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            if item in there and is_expensive(item, axes, machine) and not uses(item, written, local):
                found[item] = None
            else:
                stack += item.args

    for statement in second.point:
        for value in values_of(statement):
            look(value)
    return list(found)


def nodes_everywhere(statement: Statement) -> set[Expr]:
    """What a statement computes at every point. Where a mask does not hold, what it guards has no value: it may be a
    load from outside of its memory, and must not be computed to be kept."""
    found: set[Expr] = set()
    stack = list(values_of(statement))
    while stack:
        item = stack.pop()
        if item not in found:
            found.add(item)
            stack += (item.mask, item.other) if isinstance(item, Masked) else item.args
    return found


def is_expensive(expr: Expr, axes: set[Axis], machine: Machine) -> bool:
    """Whether keeping a float costs less than computing it again at every point of the axes."""
    if not isinstance(expr, Op | Masked) or not expr.dtype.is_floating_point or expr.atoms.isdisjoint(axes):
        return False
    cost = sum(OPERATORS[item.name].cost for item in nodes_of(expr) if isinstance(item, Op))
    return cost >= machine.store_and_load_additions


def uses(expr: Expr, written: set[str], local: set[str]) -> bool:
    nodes = nodes_of(expr)
    return bool(expr.loads & written) or any(isinstance(item, Local) and item.name in local for item in nodes)


def keep(first: Parts, second: Parts, expr: Expr, name: str, axes: Sequence[Axis]) -> None:
    coordinates = (flat_place(axes, [item.extent for item in axes]),)
    value = Local.intern(f"{name}_value", expr.dtype)
    kept: list[Statement] = [Let(value.name, expr), Store(name, coordinates, value)]
    first.point = kept + [with_values(item, {expr: value}) for item in first.point]
    again = Load.intern(name, coordinates, expr.dtype)
    second.point = [with_values(item, {expr: again}) for item in second.point]
