"""The shapes of a kernel: how the loops around the statements of a group are arranged.

flat      no member has axes beside the rows: one loop nest over all of them, cut into blocks for threads
strips    as flat, where much is computed from the column alone: see `ferrite.schedule.cpu.strips`
rows      threads share the rows; inside a row one nest after the other, with vectors along the nest's axes; scans go
          through a few rows side by side
columns   rows lie side by side in memory: vectors are made of rows, and the nests inside are plain loops
reduced   columns that are only reduced: see `ferrite.schedule.cpu.column_reduction`
products  matrix products, with what follows them: see `ferrite.schedule.cpu.product_loops`
convolutions  the same, see `ferrite.schedule.cpu.convolution_loops`
sorted    rows that are added where memory says, sorted: see `ferrite.schedule.cpu.sorted_scatter`
sharded   the same without sorting: see `ferrite.schedule.cpu.sharded_scatter`
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrite.ir import ZERO, Axis, Index, Number, data_of, number
from ferrite.ir.kernel import Loop, Statement, Store, walk
from ferrite.machines import Machine
from ferrite.schedule.cpu.column_reduction import column_reduction, is_column_reduction
from ferrite.schedule.cpu.convolution_loops import convolution_loops
from ferrite.schedule.cpu.convolutions import convolution_of
from ferrite.schedule.cpu.nest_loops import nest_loops
from ferrite.schedule.cpu.product_loops import product_loops
from ferrite.schedule.cpu.products import product_of
from ferrite.schedule.cpu.sharded_scatter import owned
from ferrite.schedule.cpu.sorted_scatter import SortedScatter, sorted_scatter
from ferrite.schedule.cpu.split_loops import decided_regions
from ferrite.schedule.cpu.strips import in_strips
from ferrite.schedule.cpu.tiles import crossing_loads, tiled
from ferrite.schedule.cpu.vectors import lanes_for, shared, unrolling, vector_loop
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of, upper_estimate
from ferrite.schedule.fusion.nests import Nest
from ferrite.schedule.loops.axes import Body, collapse, cut, indices_at, work_of
from ferrite.schedule.loops.memory_order import crossing, inner_indices, ordered_axes, vector_axes, vector_axis
from ferrite.schedule.loops.plain_loops import plain_loops
from ferrite.schedule.loops.statements import Parts
from ferrite.schedule.loops.windows import is_window, share_weights, used, written_out


def arranged(
    rows: Sequence[Axis],
    tiles: Body,
    nests: Sequence[Nest],
    parts: Sequence[Parts],
    machine: Machine,
    scatter: SortedScatter | None = None,
) -> Body:
    """The whole body of a kernel."""
    if all(not nest.axes for nest in nests) and not tiles and not any(part.states for part in parts):
        return flat(rows, tuple(statement for part in parts for statement in part.point), machine)
    if scatter is not None and (body := sorted_scatter(scatter, [tuple(part.point) for part in parts], machine)):
        return body
    product = product_of(nests[0].members[0].operation)
    if product is not None and not tiles:
        return product_loops(product, parts, machine)
    convolution = convolution_of(nests[0].members[0].operation)
    if convolution is not None and not tiles:
        return convolution_loops(convolution, parts, machine)
    column = column_axis(rows, nests, parts, machine)
    if column is None:
        return by_rows(rows, tiles, nests, parts, machine)
    if not tiles and is_column_reduction(nests, parts, machine):
        return column_reduction(rows, column, nests, parts, machine)
    return owned(rows, column, nests, parts, machine) or columns(rows, column, tiles, nests, parts, machine)


def flat(rows: Sequence[Axis], body: Body, machine: Machine) -> Body:
    indices = indices_at(body)
    order = ordered_axes(rows, indices)
    if len(order) > 1:
        across = crossing(order, indices, machine)
        if across is not None:
            if not crossing_loads(across, order[-1], body) and (parts := decided_regions(order, body)):
                return tuple(statement for axes, part in parts for statement in flat(axes, part, machine))
            blocks, inner, work = tiled(order, across, body, machine)
            return shared(blocks, inner, work, machine)
    axes, body = collapse(order, body)
    if not axes:
        return body
    strips = in_strips(axes, body, machine)
    if strips is not None:
        return shared(*strips, machine)
    *outer, last = axes
    if likely(last.extent) > 2 * machine.block_elements or not (outer or isinstance(last.extent, Number)):
        block, last, body = cut(last, machine.block_elements, body)
        outer.append(block)
    work = work_of(body)
    inner = (vector_loop(last, body, machine),)
    return shared(outer, inner, work * min(likely(last.extent), machine.block_elements), machine)


def by_rows(rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine) -> Body:
    body = tiles
    work = 0
    for nest, part in zip(nests, parts, strict=True):
        body += nest_loops(nest, part, machine)
        work += work_of(tuple(part.point)) * likely_points(nest.axes)
    axes, body = collapse(list(rows), body)
    if axes and not tiles and all(nest.scans for nest in nests) and likely(axes[-1].extent) >= machine.min_scan_rows:
        block, row, body = cut(axes[-1], machine.scan_rows_at_once, body)
        axes, body = [*axes[:-1], block], (Loop(row, "vector", body, copies=machine.scan_rows_at_once),)
        work *= machine.scan_rows_at_once
    return shared(axes, body, work, machine)


def columns(
    rows: Sequence[Axis],
    column: Axis,
    tiles: Body,
    nests: Sequence[Nest],
    parts: Sequence[Parts],
    machine: Machine,
) -> Body:
    body: Body = tiles
    work = 0
    windows = all(is_window(nest, part) or not nest.axes for nest, part in zip(nests, parts, strict=True))
    for nest, part in zip(nests, parts, strict=True):
        body += written_out(nest, part) if is_window(nest, part) else plain_loops(nest, part)
        work += work_of(tuple(part.point)) * likely_points(nest.axes)
    lanes = lanes_for(body, machine)
    copies = 4 * unrolling(work_of(body), machine)
    others = [row for row in rows if row is not column]
    outer, body = collapse(others, body)
    if any(combines(statement) for statement in walk(body)):
        # where memory decides the place, only blocks of one length, known now, can be told apart
        while copies > 1 and column.extent % number(lanes * copies) is not ZERO:
            copies //= 2
        if column.extent % number(lanes * copies) is not ZERO:
            return shared(outer, (Loop(column, "vector", body, lanes, copies),), work * likely(column.extent), machine)
    if windows and not tiles and likely(column.extent) <= machine.block_elements:
        body, at_once = used(body), machine.windows_at_once
        if outer and share_weights(body, outer[-1], column) and at_least(outer[-1].extent, at_once):
            # a strip of columns goes through all rows, so that windows below each other find in a near cache what they
            # share
            block, near, body = cut(outer[-1], at_once, body)
            strip, inside, body = cut(column, machine.window_columns, body)
            inner = (Loop(inside, "vector", (Loop(near, "vector", body, copies=at_once),), lanes, 2),)
            work *= at_once * machine.window_columns
            if len(outer) == 1:
                return shared([strip, block], inner, work, machine)
            work *= likely(block.extent)
            return shared([strip, *outer[:-1]], (Loop(block, "serial", inner),), work, machine)
        inner = (vector_loop(column, body, machine),)
        return shared(outer, inner, work * likely(column.extent), machine)
    block, last, body = cut(column, lanes * copies, body)
    inner = (Loop(last, "vector", body, lanes, copies),)
    return shared([*outer, block], inner, work * lanes * copies, machine)


def at_least(extent: Index, least: int) -> bool:
    return isinstance(extent, Number) and extent.value >= least


def combines(statement: Statement) -> bool:
    return isinstance(statement, Store) and statement.mode != "set" and any(map(data_of, statement.coordinates))


def column_axis(rows: Sequence[Axis], nests: Sequence[Nest], parts: Sequence[Parts], machine: Machine) -> Axis | None:
    """The row axis that vectors are best made of, where that is not an axis of a nest; of several the first nest's."""
    column: Axis | None = None
    for nest, part, best in vector_axes(rows, nests, parts):
        if best not in rows and is_window(nest, part):
            best = side_by_side(rows, part, inner_indices(nest, part), machine.min_window_step_elements)
        if best is None or best not in rows:
            return None
        column = column or best
    return column


def side_by_side(rows: Sequence[Axis], part: Parts, loads: Sequence[Index], far: int) -> Axis | None:
    """The row axis along which results of windows lie side by side, if windows are nearer to each other than `far`."""
    best = vector_axis(rows, [index for item in part.after if isinstance(item, Store) for index in item.coordinates])
    if best is None or any(
        (step := step_of(index, best)) is None or upper_estimate(step, far) >= far for index in loads
    ):
        return None
    return best
