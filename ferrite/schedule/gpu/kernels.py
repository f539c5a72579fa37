"""A group becomes a kernel: its nests, where its values live, its statements, the loops around them, its frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ferrite.ir import ONE, Axis, Index, Load, Random, data_of
from ferrite.ir.kernel import Kernel, Loop, Pointer, Scratch, Statement, Store, inner, nodes_in, walk
from ferrite.ir.program import Attention
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import BufferTable, axes_in, likely, step_of, upper_estimate
from ferrite.schedule.fusion.groups import Group, bytes_about
from ferrite.schedule.fusion.nests import Nest, nests_of
from ferrite.schedule.gpu.attention import attention_kernel
from ferrite.schedule.gpu.blocks import elements_of, warps_for, whole_elements, whole_lanes
from ferrite.schedule.gpu.flat import flat, is_strided
from ferrite.schedule.gpu.kept_columns import (
    KeptColumns,
    Limit,
    by_length,
    can_keep_columns,
    column_limit,
    row_axes,
    with_limit,
)
from ferrite.schedule.gpu.loop_ends import with_ends
from ferrite.schedule.gpu.products import Tuned, config_for, is_product, problem_of, product_loops, product_of
from ferrite.schedule.gpu.profit import kept_column, needs_kept_columns, without
from ferrite.schedule.gpu.rows import by_columns, by_rows, sorts
from ferrite.schedule.gpu.scatter import atomic, is_scatter
from ferrite.schedule.gpu.simplify import simplified
from ferrite.schedule.gpu.unknown_rows import in_row_pieces
from ferrite.schedule.loops.axes import Body
from ferrite.schedule.loops.frame import pointers_of, sizes_of
from ferrite.schedule.loops.memory_order import inner_indices, vector_axes, vector_axis
from ferrite.schedule.loops.placement import Placement
from ferrite.schedule.loops.statements import LoopStatements, Parts
from ferrite.schedule.loops.windows import is_window, used, written_out
from ferrite.schedule.target import BuiltKernel


def build(
    group: Group, inside: tuple[str, ...], buffer_table: BufferTable, machine: GpuMachine, tuned: Tuned
) -> BuiltKernel:
    """The kernel of a group; `inside`: storages that nothing else touches."""
    if isinstance(group.members[0].operation, Attention):
        return attention_kernel(group, buffer_table, machine)
    if is_product(group.members[0].operation):
        return product_kernel(group, inside, buffer_table, machine, tuned)
    columns, longer, limit = kept_columns_of(group, buffer_table, machine)
    if columns is None:
        body, made = statements_of(group, inside, None, buffer_table, machine)
    else:
        body, made = statements_of(columns.group, inside, columns, buffer_table, machine)
        if longer is not None and limit is not None:
            other, made_too = statements_of(longer.group, inside, longer, buffer_table, machine)
            body = by_length(limit, body, other)
            made.add(made_too)
        body = columns.over_pieces(body)
    held = columns is not None or is_kept(nests_of(group, buffer_table), machine)
    pointers = tuple(with_hint(item, body, held, group, buffer_table, machine) for item in pointers_of(made, body))
    kernel = Kernel(pointers, sizes_of(body), body, group.origins, warps_of(body, machine))
    return BuiltKernel(kernel, tuple(item.name for item in pointers))


def statements_of(
    group: Group, inside: tuple[str, ...], columns: KeptColumns | None, buffer_table: BufferTable, machine: GpuMachine
) -> tuple[Body, LoopStatements]:
    """What a kernel does; of kept columns, in a piece."""
    scatter = is_scatter(group)
    rows: tuple[Axis, ...] = group.rows
    if scatter:  # every point is on its own: those that meet in memory do so atomically
        rows, inside = group.members[0].axes, ()
    nests = nests_of(Group(rows, group.members, group.accesses, group.device), buffer_table)
    kept = is_kept(nests, machine)
    banned: set[str] = set()
    while True:
        tiles_of = [name for name in inside if name not in banned]
        placement = Placement(nests, rows, tiles_of, buffer_table, machine.kept_elements * 4 if kept else 0)
        if columns is not None:
            columns.keep(placement)
        made = LoopStatements(placement, buffer_table, rows, wider={}, short_places=True)
        parts = [made.nest(nest) for nest in nests]
        tiles: Body = tuple(tile.scratch for tile in placement.tiles.values())
        if columns is None:
            body = arranged(rows, tiles, nests, parts, machine, kept)
        else:
            columns.write(made)
            body = columns.arranged(placement, nests, parts, machine)
        wrong = misplaced(body)
        if not wrong:
            return atomic(body) if scatter else body, made
        banned |= {name for name, tile in placement.tiles.items() if tile.name in wrong}


def product_kernel(
    group: Group, inside: tuple[str, ...], buffer_table: BufferTable, machine: GpuMachine, tuned: Tuned
) -> BuiltKernel:
    """The same where the first member is a matrix product, and the others are at its points."""
    operation = group.members[0].operation
    product = product_of(operation)
    assert product is not None
    config = config_for(problem_of(operation, buffer_table), machine, tuned)
    nests = nests_of(group, buffer_table)
    made = LoopStatements(Placement(nests, group.rows, inside, buffer_table, 0), buffer_table, group.rows, wider={})
    parts = [made.nest(nest) for nest in nests]
    body = simplified(product_loops(product, parts, config))
    pointers = pointers_of(made, body)
    resident = machine.multiprocessors if config.resident else 0
    kernel = Kernel(pointers, sizes_of(body), body, group.origins, config.warps, resident=resident)
    return BuiltKernel(kernel, tuple(item.name for item in pointers))


def with_hint(
    pointer: Pointer, body: Body, kept: bool, group: Group, buffer_table: BufferTable, machine: GpuMachine
) -> Pointer:
    """Whether what is behind a pointer is read once, by this kernel alone, and is more than half of what the cache
    holds. What is written
    would take its place there; so it only matters where that is little. Or whether several loops of a row read it.
    Measured: sums of 32768 x 1024 in bf16 take 3 us less of 24, addition and softmax 1 more. Softmax of 2048 rows of
    65536 takes 181 us with the second hint, 198 without."""
    buffer = buffer_table.buffers[pointer.name]
    if pointer.access == "read" and not kept and bytes_about(pointer.name, buffer_table) >= machine.cache_bytes // 2:
        readers = [(load.coordinates, around[-1]) for load, around in loads_of(pointer.name, body) if around]
        if len({id(loop) for _, loop in readers}) > 1 and len({place for place, _ in readers}) == 1:
            return replace(pointer, again=True)
    written = {item.buffer for item in walk(body) if isinstance(item, Store) and item.buffer in buffer_table.buffers}
    if 8 * sum(bytes_about(name, buffer_table) for name in written) > bytes_about(pointer.name, buffer_table):
        return pointer
    if pointer.access != "read" or bytes_about(pointer.name, buffer_table) < machine.cache_bytes // 2:
        return pointer
    storage = buffer.storage
    here = sum(any(each.storage == storage and not each.writes for each in item.accesses) for item in group.members)
    if buffer_table.readers.get(storage, 0) > here:
        return pointer
    loads = loads_of(pointer.name, body)
    loops = {id(around[-1]) for _, around in loads if around}
    if len({load.coordinates for load, _ in loads}) != 1 or (len(loops) > 1 and not kept):
        return pointer
    load, around = loads[0]
    moving = {loop.axis for loop in around if loop.axis.extent is not ONE}
    once = moving <= load.coordinates[0].atoms and not data_of(load.coordinates[0]) and buffer.kind != "view"
    return replace(pointer, once=once)


def loads_of(name: str, body: Body, around: tuple[Loop, ...] = ()) -> list[tuple[Load, tuple[Loop, ...]]]:
    """The loads of a pointer, each with the loops around it."""
    found = []
    for statement in body:
        within = (*around, statement) if isinstance(statement, Loop) else around
        found += [(item, around) for item in nodes_in(statement) if isinstance(item, Load) and item.buffer == name]
        found += loads_of(name, inner(statement), within)
    return found


def kept_columns_of(
    group: Group, buffer_table: BufferTable, machine: GpuMachine
) -> tuple[KeptColumns | None, KeptColumns | None, Limit | None]:
    """The group as rows that are gone through while columns are kept, where it is one; and where a limit says how many
    columns are, as rows that are added up in memory, too."""
    if not group.rows and (cut := in_row_pieces(group.members, group.device)) is not None:
        group = cut
    rows = group.rows
    if (column := kept_column(group.members, rows)) is not None:
        rows = without(rows, column)
    elif not needs_kept_columns(group.members, rows, machine):
        return None, None, None
    if not can_keep_columns(group.members, rows, machine):
        return None, None, None
    found = row_axes(group.members, rows)
    assert found is not None
    whole = Group(rows, group.members, group.accesses, group.device)
    limit = column_limit(group.members, rows, found)
    if limit is None:
        return KeptColumns(whole, found, buffer_table), None, None
    held = KeptColumns(with_limit(whole, found, limit), found, buffer_table)
    return held, KeptColumns(whole, found, buffer_table, in_memory=True), limit


def warps_of(body: Body, machine: GpuMachine) -> int:
    loops = [loop for loop in walk(body) if isinstance(loop, Loop)]
    if any(loop.kind == "sort" for loop in loops):
        return warps_for(body, machine, machine.sort_thread_elements)
    if any(loop.kind == "serial" and loop.copies > 1 for loop in loops):
        return warps_for(body, machine, machine.kept_column_elements)
    if loops and all(loop.kind in ("parallel", "vector") for loop in loops):
        if is_strided(loops[-1].body, loops[-1].axis, machine):
            return warps_for(body, machine, machine.window_elements)
        if any(isinstance(item, Random) for statement in walk(body) for item in nodes_in(statement)):
            return warps_for(body, machine, machine.random_elements)
        if is_transposition(loops):
            return warps_for(body, machine, machine.tile_elements)
    if any(loop.kind == "vector" and loop.lanes > 1 and goes_through_blocks(loop.body) for loop in loops):
        is_busy = programs_of(body) >= machine.multiprocessors
        return warps_for(body, machine, machine.column_elements if is_busy else machine.few_column_elements)
    if any(loop.kind == "vector" and loop.lanes > 1 and reduces_columns(loop) for loop in loops):
        return warps_for(body, machine, machine.held_column_elements)
    blocks = [loop for loop in loops if loop.kind in ("vector", "reduction", "scan", "sort")]
    reduced = [loop for loop in blocks if loop.kind == "reduction" and whole_lanes(loop.axis.extent) == loop.lanes]
    if len(reduced) > 1 and len(blocks) == len(reduced) + 1 and elements_of(body) <= machine.max_reduced_block_elements:
        return warps_for(body, machine, machine.reduced_elements)
    return warps_for(body, machine)


def is_transposition(loops: Sequence[Loop]) -> bool:
    """Whether a block has two sides, and memory lies along either."""
    if len(loops) < 2 or min(loop.lanes for loop in loops[-2:]) == 1:
        return False
    body = loops[-1].body
    places = [item.coordinates[0] for part in walk(body) for item in nodes_in(part) if isinstance(item, Load)]
    places += [item.coordinates[0] for item in walk(body) if isinstance(item, Store)]
    return all(any(step_of(place, loop.axis) is ONE for place in places) for loop in loops[-2:])


def goes_through_blocks(body: Body) -> bool:
    """Whether something is reduced a block at a time."""
    loops = [loop for loop in walk(body) if isinstance(loop, Loop) and loop.kind == "reduction"]
    return any(whole_lanes(loop.axis.extent) != loop.lanes for loop in loops)


def programs_of(body: Body) -> int:
    """How many there are likely to be: one for each value of the loops at the top, or for each block of them."""
    count = 1
    while len(body) == 1 and isinstance(loop := body[0], Loop) and loop.kind in ("parallel", "vector"):
        count *= -(-likely(loop.axis.extent) // loop.lanes)
        body = loop.body
    return count


def reduces_columns(loop: Loop) -> bool:
    """Whether what lies side by side along a loop is reduced along others."""
    inside = [item for item in walk(loop.body) if isinstance(item, Loop) and item.kind == "reduction"]
    loads = [item for each in inside for part in each.body for item in nodes_in(part) if isinstance(item, Load)]
    along = [step_of(load.coordinates[0], loop.axis) is ONE for load in loads]
    across = [step_of(load.coordinates[0], each.axis) is ONE for load in loads for each in inside]
    return any(along) and not any(across)


def is_kept(nests: Sequence[Nest], machine: GpuMachine) -> bool:
    """Whether a program can hold a row: one value of it for each storage of which several loops need elements."""
    loops = [nest for nest in nests if nest.axes and (nest.scans or not nest.ordered)]
    touched = [
        {
            access.storage
            for member in nest.members
            for access in member.accesses
            if not axes_in(access.place).isdisjoint(nest.axes)
        }
        for nest in loops
    ]
    several = [name for name in set().union(*touched) if sum(name in some for some in touched) > 1]
    room = machine.kept_elements // max(len(several), 1)
    sizes = [whole_elements(nest.axes) for nest in loops]
    return all(size is not None and size <= room for size in sizes)


def arranged(
    rows: Sequence[Axis], tiles: Body, nests: Sequence[Nest], parts: Sequence[Parts], machine: GpuMachine, kept: bool
) -> Body:
    """The whole body of a kernel."""
    column = column_axis(rows, nests, parts)
    plain = [not nest.axes and not part.states for nest, part in zip(nests, parts, strict=True)]
    stored = [item for part in parts for item in (*part.point, *part.after) if isinstance(item, Store)]
    results = vector_axis(rows, [index for item in stored for index in item.coordinates])
    short = [is_short(nest, part, column, results, machine) for nest, part in zip(nests, parts, strict=True)]
    if sum(points_of(nest) for nest in nests if nest.axes) > machine.max_written_window:
        short = [False] * len(nests)
    if not tiles and all(one or other for one, other in zip(plain, short, strict=True)):
        body: Body = ()
        for nest, part, is_plain in zip(nests, parts, plain, strict=True):
            body += tuple(part.point) if is_plain else written_out(nest, part)
        return flat(rows, simplified(used(body)), machine)
    if column is not None and not tiles and not any(map(sorts, nests)):
        return with_ends(simplified(by_columns(rows, column, nests, parts, machine)))
    return with_ends(simplified(by_rows(rows, tiles, nests, parts, machine, kept)))


def is_short(nest: Nest, part: Parts, column: Axis | None, results: Axis | None, machine: GpuMachine) -> bool:
    """Whether what is reduced is so little that it is written out: the lanes are results. `results`: the axis along
    which these lie side by side; windows of neighbours should be near each other."""
    if not is_window(nest, part, machine.max_written_window):
        return False
    elements = points_of(nest) * len(part.states)
    if column is not None:
        return elements <= machine.max_written_across
    loads = inner_indices(nest, part)
    if results is not None and all(
        is_near(each, results, machine) and not is_row(each, nest, results) for each in loads
    ):
        return elements <= machine.max_written_window
    return elements <= machine.max_written_along


def is_row(index: Index, nest: Nest, results: Axis) -> bool:
    """Whether each result has elements of its own, side by side: a few threads load them as one."""
    if len(nest.axes) > 1:
        return False
    (axis,) = nest.axes
    return step_of(index, axis) is ONE and step_of(index, results) is axis.extent


def is_near(index: Index, axis: Axis, machine: GpuMachine) -> bool:
    """Whether one step of an axis is a few elements."""
    step = step_of(index, axis)
    return step is not None and abs(upper_estimate(step, machine.max_lane_step + 1)) <= machine.max_lane_step


def points_of(nest: Nest) -> int:
    return math.prod(upper_estimate(item.extent, 1 << 30) for item in nest.axes)


def column_axis(rows: Sequence[Axis], nests: Sequence[Nest], parts: Sequence[Parts]) -> Axis | None:
    """The row axis along which memory lies side by side in every loop inside the rows; None where there is none."""
    column: Axis | None = None
    for _nest, _part, best in vector_axes(rows, nests, parts):
        if best is None or best not in rows or (column is not None and best is not column):
            return None
        column = best
    return column


# --- tiles ------------------------------------------------------------------------------------------------------------


def misplaced(body: Body) -> set[str]:
    """Tiles that are no blocks: what is read or written of one is not a lane of a loop around."""
    sizes: dict[str, tuple[int, int]] = {}  # lanes of a tile, and how many loops with lanes are around where it begins
    found: set[str] = set()

    def look(statements: Sequence[Statement], around: tuple[Loop, ...]) -> None:
        for statement in statements:
            if isinstance(statement, Scratch):
                sizes[statement.name] = whole_lanes(statement.sizes[0]) or 1, len(around)
            loads = [(item.buffer, item.coordinates) for item in nodes_in(statement) if isinstance(item, Load)]
            stores = [(statement.buffer, statement.coordinates)] if isinstance(statement, Store) else []
            for name, coordinates in loads + stores:
                if name not in sizes:
                    continue
                lanes, depth = sizes[name]
                places = [loop.axis for loop in around[depth:] if loop.axis is coordinates[0] and loop.lanes == lanes]
                others = len(around) - depth - len(places)
                if (lanes > 1 and not places) or (name in dict(stores) and others):
                    found.add(name)
            has_lanes = isinstance(statement, Loop) and statement.lanes > 1
            look(inner(statement), (*around, statement) if has_lanes else around)  # type: ignore[arg-type]

    look(body, ())
    return found
