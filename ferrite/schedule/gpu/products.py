"""Matrix products on a GPU: blocks of rows and columns, whose sums a program's matrix units make block by block.

    for b in parallel(8):
        for row in vector(512, lanes=128, copies=8):                a block of the result is a program
            for column in vector(4096, lanes=256):
                with sum(f32) as total:
                    for k in reduction(1024, lanes=64, copies=3):   blocks of both factors, three of which are under way
                        total.update(f32(left[...]) * f32(right[...]))
                ...                                                 what follows at the same points: a bias, stores

The block of all products of a step, 128 x 256 x 64, is never there: the code generator sees that the sum is updated
with a product of two factors, and multiplies blocks of these. `copies` of the rows are blocks that programs go through
before the next block of columns.

Which blocks: what was measured for a product, if it was (`tuned`), else by a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ferrite.errors import Refusal
from ferrite.graph import HALVES
from ferrite.ir import ONE, Axis, Cast, Expr, Load, Number, nodes_of, short
from ferrite.ir.kernel import Accumulate, Loop
from ferrite.ir.program import Compute, Operation, Reduce
from ferrite.machines import GpuMachine
from ferrite.schedule.fusion.accesses import BufferTable, likely_points, step_of
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.fusion.members import Member
from ferrite.schedule.gpu.blocks import power_above
from ferrite.schedule.loops.axes import Body, nested
from ferrite.schedule.loops.products import ProductAxes, axes_under, factors_in, product_in
from ferrite.schedule.loops.statements import Parts
from ferrite.tune import CANDIDATES, WIDE_CANDIDATES, Along, ProductConfig, ProductProblem

Tuned = Mapping[ProductProblem, ProductConfig]
# The least that a matrix unit multiplies: with fewer rows or columns lanes are idle, with less to add up most are. A
# result of fewer elements, or of shorter sums, is an ordinary reduction.
MIN_BLOCK_SIDE, MIN_SUMMED = 16, 16
MIN_ELEMENTS = MIN_BLOCK_SIDE * MIN_BLOCK_SIDE
MIN_STAGES = 2  # with fewer nothing is loaded while something is multiplied


def product_of(operation: Operation) -> ProductAxes | None:
    """The axes of an operation that is a matrix product, of sizes that are known, in a type that is multiplied as
    exactly in blocks: 16 bits, or 32 with all their digits."""
    product = product_in(operation)
    if product is None or not isinstance(operation, Reduce) or operation.values[0].dtype is not torch.float32:
        return None
    if not all(isinstance(item.extent, Number) for item in (*operation.axes, product.summed)):
        return None
    if likely_points((product.rows, product.columns)) < MIN_ELEMENTS or likely_points((product.summed,)) < MIN_SUMMED:
        return None
    return product


def is_product(operation: Operation) -> bool:
    return product_of(operation) is not None


def reason_apart(group: Group, member: Member, rows: Sequence[Axis]) -> Refusal | None:
    """Why a member is in another kernel than a group, where one of them is a matrix product."""
    if is_product(member.operation):
        return Refusal("a matrix product begins a kernel of its own")
    if tuple(rows) != group.rows or member.inner(rows) or not isinstance(member.operation, Compute):
        return Refusal("it is not at the points of the matrix product before it")
    if any(store.mode != "set" for store in member.operation.stores):
        return Refusal("it adds to memory behind a matrix product")
    return None


# --- problems and configurations --------------------------------------------------------------------------------------


def problem_of(operation: Operation, buffer_table: BufferTable) -> ProductProblem:
    """What decides how fast a product is. What follows it is left out: it takes the same time for all blocks."""
    product, factors = product_of(operation), factors_in(operation)
    assert product is not None
    assert factors is not None
    left, right = factors if product.rows in axes_under(factors[0]) else reversed(factors)
    return ProductProblem(
        short(factor_type(left, right)),
        likely_points(product.batch),
        likely_points((product.rows,)),
        likely_points((product.columns,)),
        likely_points((product.summed,)),
        along(left, {"rows": product.rows, "summed": product.summed}, buffer_table),
        along(right, {"columns": product.columns, "summed": product.summed}, buffer_table),
    )


def factor_type(left: Expr, right: Expr) -> torch.dtype:
    """The type in which two factors are multiplied: products of 16 bits are exact in 32."""
    types = {factor.arg.dtype for factor in (left, right) if isinstance(factor, Cast)}
    if all(isinstance(factor, Cast) for factor in (left, right)) and len(types) == 1 and types <= set(HALVES):
        return types.pop()
    return torch.float32


def along(factor: Expr, axes: Mapping[Along, Axis], buffer_table: BufferTable) -> Along:
    loads = [item for item in nodes_of(factor) if isinstance(item, Load) and set(axes.values()) <= axes_under(item)]
    places = [buffer_table.place(item.buffer, item.coordinates) for item in loads]
    for name, item in axes.items():
        if places and all(step_of(place, item) is ONE for place in places):
            return name
    return "neither"


def config_for(problem: ProductProblem, machine: GpuMachine, tuned: Tuned) -> ProductConfig:
    """What was measured to be fastest, else what is likely to be."""
    return fitted(clipped(tuned.get(problem) or likely_config(problem, machine), problem), problem, machine)


def fitted(config: ProductConfig, problem: ProductProblem, machine: GpuMachine) -> ProductConfig:
    """With fewer blocks under way, or smaller ones, where a multiprocessor has no room for all of them."""
    while not has_room(config, problem, machine):
        if config.stages > MIN_STAGES:
            config = replace(config, stages=config.stages - 1)
        elif config.summed > MIN_BLOCK_SIDE:
            config = replace(config, summed=config.summed // 2)
        else:
            break
    return config


def has_room(config: ProductConfig, problem: ProductProblem, machine: GpuMachine) -> bool:
    return config.shared_bytes(4 if problem.dtype == "f32" else 2) <= machine.program_shared_bytes


def candidates(problem: ProductProblem, machine: GpuMachine) -> list[ProductConfig]:
    """Configurations that may be the fastest, and fit a multiprocessor; the likely one first."""
    found = [likely_config(problem, machine)]
    for config in WIDE_CANDIDATES if problem.dtype == "f32" else CANDIDATES:
        if config.rows > 2 * max(problem.rows, MIN_BLOCK_SIDE) or config.columns > 2 * problem.columns:
            continue
        if config.resident and (not machine.has_descriptors or 2 * config.programs(problem) < machine.multiprocessors):
            continue
        found.append(config)
        if config.programs(problem) < machine.multiprocessors and not config.resident:
            found.append(with_pieces(config, problem, machine))
    fitting = dict.fromkeys(clipped(config, problem) for config in found)
    return [config for config in fitting if has_room(config, problem, machine)]


def clipped(config: ProductConfig, problem: ProductProblem) -> ProductConfig:
    """No blocks that are twice as large as the product or more, and no more of them than it has. Pieces divide what is
    summed."""
    sides = {
        side: max(min(getattr(config, side), power_above(getattr(problem, side))), MIN_BLOCK_SIDE)
        for side in ("rows", "columns", "summed")
    }
    pieces = config.pieces if problem.summed % config.pieces == 0 else 1
    in_column = min(config.in_column, -(-problem.rows // sides["rows"]))
    return replace(config, **sides, in_column=in_column, pieces=pieces)


def likely_config(problem: ProductProblem, machine: GpuMachine) -> ProductConfig:
    """By sizes alone. Few rows, or columns, are multiplied in blocks that read much of the other factor at once."""
    blocks = machine.products
    if problem.dtype == "f32":
        return blocks.in_32_bits
    if problem.rows <= MIN_BLOCK_SIDE:
        wide = blocks.few_rows_and_many_columns
        is_enough = wide.programs(problem) >= machine.multiprocessors
        return wide if is_enough else with_pieces(blocks.few_rows, problem, machine)
    if problem.rows <= 2 * MIN_BLOCK_SIDE:
        return blocks.some_rows
    if min(problem.rows, problem.columns) <= min(blocks.thin.rows, blocks.thin.columns):
        return with_pieces(clipped(blocks.thin, problem), problem, machine)
    possible = [config for config in blocks.large if machine.has_descriptors or not config.resident]
    enough = [config for config in possible if config.programs(problem) >= machine.multiprocessors]
    return enough[0] if enough else with_pieces(blocks.large[-1], problem, machine)


def with_pieces(config: ProductConfig, problem: ProductProblem, machine: GpuMachine) -> ProductConfig:
    """So many parts of each sum that all multiprocessors are busy; of at least some steps each, or another kernel would
    take longer than they save."""
    pieces = 1
    while (
        config.programs(problem) * 2 * pieces <= 2 * machine.multiprocessors
        and problem.summed % (2 * pieces * config.summed) == 0
        and problem.summed // (2 * pieces) >= machine.min_piece_summed
    ):
        pieces *= 2
    return replace(config, pieces=pieces)


# --- loops ------------------------------------------------------------------------------------------------------------


def product_loops(product: ProductAxes, parts: Sequence[Parts], config: ProductConfig) -> Body:
    """The whole body of the kernel; `parts`: the sum, and what follows it at every point of the result."""
    first, *others = parts
    summed = Loop(product.summed, "reduction", tuple(first.point), config.summed, config.stages)
    follows = (*first.after, *(statement for part in others for statement in part.point))
    body: Body = (Accumulate(tuple(first.states), (summed,)), *follows)
    body = (Loop(product.columns, "vector", body, config.columns),)
    body = (Loop(product.rows, "vector", body, config.rows, config.in_column),)
    return nested(product.batch, body, "parallel")
