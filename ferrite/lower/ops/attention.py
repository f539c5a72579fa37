"""Attention with functions of the user on its scores (flex attention).

Where its device has such a kernel, it is one operation: queries, keys and values in memory, the functions as
expressions over one score and its place, and lists of blocks, by which blocks without anything allowed are skipped.
Elsewhere it is matrix products, with the functions as elementwise loops between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.errors import NotLowered
from ferrite.graph import HALVES
from ferrite.ir import (
    ONE,
    ZERO,
    Axis,
    Expr,
    Index,
    Number,
    Param,
    axis,
    cast,
    const,
    index_value,
    op,
)
from ferrite.ir.program import Attention, BlockList, Destination, Gradients, Origin
from ferrite.lower.apply import mode_of
from ferrite.lower.builder import Builder
from ferrite.lower.calls import flat
from ferrite.lower.functions import element, outputs_of, results_of_function
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import wanted_strides
from ferrite.lower.table import lowers, lowers_later
from ferrite.lower.value import Box, Value, whole
from ferrite.machines import MATRIX_UNIT_SIDE

FORWARD, BACKWARD = (torch_operators.higher_order(name) for name in ("flex_attention", "flex_attention_backward"))
TYPES = (torch.float32, *HALVES)
WHOLE_LENGTH = 1 << 30  # the side of a block by which torch says that there are no blocks
MAX_COLUMNS = 256  # of a head: a program has a row of it in registers
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Blocks:
    """Rows and keys of a block, and which of them are looked at; without lists, all are."""

    sides: tuple[int, int] = (0, 0)
    key_blocks: tuple[BlockList, ...] = ()
    row_blocks: tuple[BlockList, ...] = ()


@dataclass(frozen=True)
class AttentionOperands:
    """What both directions are given. `place`: batch, head of keys, head of queries for one of keys, row, key."""

    query: Value
    key: Value
    value: Value
    place: tuple[Axis, Axis, Axis, Axis, Axis]
    summed: Axis
    columns: Axis
    mode: Any

    @property
    def head(self) -> Index:
        return self.place[1] * self.place[2].extent + self.place[2]

    @property
    def is_shared(self) -> bool:
        """Whether all of a batch have the same keys."""
        return self.key.sizes[0] is ONE and self.query.sizes[0] is not ONE

    def at_row(self, value: Value, *last: Index) -> Expr:
        batch, _, _, row, _ = self.place
        return value.at((batch, self.head, row, *last))

    def at_key(self, value: Value, last: Index) -> Expr:
        batch, head, _, _, key = self.place
        return value.at((ZERO if self.is_shared else batch, head, key, last))

    def operation(
        self,
        score: Expr,
        allowed: Expr,
        destinations: Sequence[Destination | None],
        origin: Origin,
        blocks: Blocks,
        gradients: Gradients | None = None,
    ) -> Attention:
        batch, key_head, group, row, key = self.place
        return Attention(
            axes=(batch, key_head),
            group=group,
            rows=row,
            keys=key,
            summed=self.summed,
            columns=self.columns,
            query=self.at_row(self.query, self.summed),
            key=self.at_key(self.key, self.summed),
            value=self.at_key(self.value, self.columns),
            score=score,
            allowed=allowed,
            destinations=tuple(destinations),
            block_sides=blocks.sides,
            key_blocks=blocks.key_blocks,
            row_blocks=blocks.row_blocks,
            gradients=gradients,
            origin=origin,
        )


def operands_of(ctx: Builder, query: Value, key: Value, value: Value) -> AttentionOperands:
    if query.device.type not in ctx.attention_on:
        raise NotLowered(f"attention has no kernel of its own on {query.device.type}")
    if {query.dtype, key.dtype, value.dtype} != {query.dtype} or query.dtype not in TYPES:
        raise NotLowered(f"attention of {query.dtype}, {key.dtype} and {value.dtype}")
    heads, key_heads = query.sizes[1], key.sizes[1]
    if heads is key_heads:
        group: Index = ONE
    elif isinstance(heads, Number) and isinstance(key_heads, Number) and key_heads.value:
        group = heads // key_heads
    else:
        raise NotLowered("how many heads of queries share one of keys is known only when it runs")
    lengths = (query.sizes[3], value.sizes[3])
    if not all(isinstance(each, Number) and 0 < each.value <= MAX_COLUMNS for each in lengths):
        raise NotLowered(f"heads of {lengths[0]} and {lengths[1]} elements: a kernel has {MAX_COLUMNS} at most")
    sizes = (query.sizes[0], key_heads, group, query.sizes[2], key.sizes[2])
    if any(size.low is None or size.low < 1 for size in sizes):
        raise NotLowered("nothing to attend to, perhaps")
    for each in (query, key, value):
        ctx.realise(each.box)
    place = tuple(axis(name, size) for name, size in zip(("b0", "k0", "g0", "m0", "n0"), sizes, strict=True))
    fakes = [each.fake for each in (query, key, value)]
    summed, columns = axis("d0", query.sizes[3]), axis("e0", value.sizes[3])
    return AttentionOperands(query, key, value, place, summed, columns, mode_of(fakes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Functions:
    """Expressions over one score; `gradient`: of the sum of products."""

    score: Expr
    allowed: Expr
    gradient: Expr | None = None


def functions_of(
    ctx: Builder,
    given: AttentionOperands,
    score_mod: Any,
    mask_mod: Any,
    scale: Any,
    score_buffers: Sequence[Any],
    mask_buffers: Sequence[Any],
    joint: Any = None,
) -> Functions:
    if not isinstance(scale, (int, float)):
        raise NotLowered("a scale that is known only when it runs")
    device, mode = given.query.device, given.mode
    batch, _, _, row, key = given.place
    factor = const(float(scale), torch.float32)
    score = element(ctx, op("mul", Param.intern(0, torch.float32), factor), device, mode)
    places = [element(ctx, index_value(each, torch.int32), device, mode) for each in (batch, given.head, row, key)]
    for each in (*score_buffers, *mask_buffers):
        if isinstance(each, Value):
            if each.device != device and each.rank:
                raise NotLowered("a tensor on another device, read by a function of the scores")
            if each.box.expr is not None and each.box.expr.args:
                ctx.realise(each.box)  # or else it would be computed again for every score
    (found,) = results_of_function(ctx, score_mod, [score, *places, *score_buffers], mode)
    (allowed,) = results_of_function(ctx, mask_mod, [*places, *mask_buffers], mode)
    if found is None or allowed is None:
        raise NotLowered("a function of the scores that returns nothing")
    gradient = None
    if joint is not None:
        outer = element(ctx, Param.intern(1, torch.float32), device, mode)
        if isinstance(joint, torch.fx.GraphModule) and any(each is not None for each in outputs_of(joint)[1:]):
            raise NotLowered("gradients of tensors that a function of the scores reads")
        gradient, *_ = results_of_function(ctx, joint, [score, *places, outer, *score_buffers], mode)
        gradient = const(0.0, torch.float32) if gradient is None else cast(gradient, torch.float32)
        gradient = op("mul", gradient, factor)
    return Functions(cast(found, torch.float32), cast(allowed, torch.bool), gradient)


def blocks_of(ctx: Builder, given: AttentionOperands, block_mask: Sequence[Any], with_rows: bool) -> Blocks:
    """Of what torch hands over: lengths, then lists of blocks of keys for rows and of rows for keys, of each those in
    which scores are asked about and those that are allowed as a whole; last the sides of blocks, and the function."""
    sides = block_mask[-3], block_mask[-2]
    if not all(isinstance(side, int) for side in sides):
        raise NotLowered("blocks whose size is known only when it runs")
    if min(sides) >= WHOLE_LENGTH:
        return Blocks()
    if any(side % MATRIX_UNIT_SIDE for side in sides):
        raise NotLowered(f"blocks of {sides[0]} by {sides[1]}: matrix units multiply {MATRIX_UNIT_SIDE} at a time")
    _, _, _, row, key = given.place
    key_blocks = lists_of(ctx, given, block_mask[2:6], row // sides[0], 0)
    row_blocks: tuple[BlockList, ...] = ()
    if with_rows:
        row_blocks = lists_of(ctx, given, block_mask[6:10], key // sides[1], len(key_blocks))
    return Blocks(sides, key_blocks, row_blocks)


def lists_of(
    ctx: Builder, given: AttentionOperands, lists: Sequence[Any], at: Index, first: int
) -> tuple[BlockList, ...]:
    found: list[BlockList] = []
    for number, (counts, places) in enumerate(zip(lists[::2], lists[1::2], strict=True)):
        if counts is None and number:
            continue
        if not isinstance(counts, Value) or not isinstance(places, Value) or places.rank != 4:
            raise NotLowered("lists of blocks that are no tensors")
        for each in (counts, places):
            ctx.realise(each.box)
        entry = axis(f"j{first + len(found)}", places.sizes[3])
        around = [
            ZERO if size is ONE else item
            for size, item in zip(places.sizes, (given.place[0], given.head), strict=False)
        ]
        count, place = counts.at((*around, at)), places.at((*around, at, entry))
        found.append(BlockList(entry, count, place, whole=number == 1))
    return tuple(found)


def destination(ctx: Builder, number: int, sizes: Sequence[Index], at: Sequence[Index], dtype: torch.dtype) -> Any:
    """Memory for a result, with eager's strides, and the value that sees it."""
    device = flat(ctx.out)[number].device
    box = Box(tuple(sizes), dtype, device, origins=(ctx.origin,))
    box.buffer = ctx.new_buffer(box, wanted_strides(ctx, number, sizes))
    coordinates = tuple(ZERO if size is ONE else item for size, item in zip(sizes, at, strict=True))
    return Destination(box.buffer, coordinates), whole(box)


@lowers(*filter(None, [FORWARD]), otherwise=torch_operators.eager_form)
def flex_attention(
    ctx: Builder,
    query: Value,
    key: Value,
    value: Value,
    score_mod: Any,
    block_mask: Sequence[Any],
    scale: Any,
    kernel_options: Mapping[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> Any:
    given = operands_of(ctx, query, key, value)
    blocks = blocks_of(ctx, given, block_mask, with_rows=False)
    about = score_mod, block_mask[-1], scale, score_mod_other_buffers, mask_mod_other_buffers
    functions = functions_of(ctx, given, *about)
    batch, _, _, row, _ = given.place
    rows = (batch, given.head, row)
    sizes = query.sizes[:3]
    wanted: list[tuple[int, tuple[Index, ...], tuple[Index, ...], torch.dtype]]
    wanted = [(0, (*sizes, value.sizes[3]), (*rows, given.columns), query.dtype)]
    wanted += [(number, sizes, rows, torch.float32) for number in (1, 2)]
    made = [destination(ctx, *each) if ctx.is_used(each[0]) else (None, None) for each in wanted]
    if all(place is None for place, _ in made):
        made[0] = destination(ctx, *wanted[0])
    results = [place for place, _ in made]
    ctx.add(given.operation(functions.score, functions.allowed, results, ctx.origin, blocks))
    # a result that nobody reads is still a value
    return [
        result if result is not None else ctx.fill(each[1], 0.0, each[3], query.device)
        for (_, result), each in zip(made, wanted, strict=True)
    ]


@lowers_later("ferrite.attention.default")
def attention(
    ctx: Builder, query: Value, key: Value, value: Value, mask: Value | None, is_causal: bool, scale: float | None
) -> Any:
    """Torch's attention: a mask is added to scores, or says where they count."""
    given = operands_of(ctx, query, key, value)
    batch, _, _, row, keys = given.place
    width = given.summed.extent
    assert isinstance(width, Number)
    factor = const(1 / math.sqrt(width.value) if scale is None else float(scale), torch.float32)
    score: Expr = op("mul", Param.intern(0, torch.float32), factor)
    allowed: Expr = const(True, torch.bool)
    if is_causal:
        allowed = op("ge", index_value(row), index_value(keys), dtype=torch.bool)
    if mask is not None:
        ctx.realise(mask.box)
        places = (batch, given.head, row, keys)[4 - mask.rank :]
        found = mask.at([ZERO if size is ONE else item for size, item in zip(mask.sizes, places, strict=True)])
        if found.dtype is torch.bool:
            allowed = found if not is_causal else op("logical_and", allowed, found, dtype=torch.bool)
        else:
            score = op("add", score, cast(found, torch.float32))
    rows = (batch, given.head, row)
    sizes = query.sizes[:3]
    result, out = destination(ctx, 0, (*sizes, value.sizes[3]), (*rows, given.columns), query.dtype)
    logarithm, lse = destination(ctx, 1, sizes, rows, torch.float32) if ctx.is_used(1) else (None, None)
    ctx.add(given.operation(score, allowed, (result, logarithm, None), ctx.origin, Blocks()))
    if lse is None:
        return [out, ctx.fill(sizes, 0.0, torch.float32, query.device)]
    natural = op("mul", ctx.elements(lse, sizes), const(1 / LOG2_E, torch.float32))
    return [out, ctx.lazy(sizes, natural, query.device)]


@lowers(*filter(None, [BACKWARD]), otherwise=torch_operators.eager_form)
def flex_attention_backward(
    ctx: Builder,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    grad_out: Value | None,
    grad_logsumexp: Value | None,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: Sequence[Any],
    scale: Any,
    kernel_options: Mapping[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> Any:
    given = operands_of(ctx, query, key, value)
    if given.is_shared:
        raise NotLowered("gradients of keys that a whole batch shares")
    if grad_out is None:
        raise NotLowered("gradients of a result that has none")
    blocks = blocks_of(ctx, given, block_mask, with_rows=True)
    about = fw_graph, block_mask[-1], scale, score_mod_other_buffers, mask_mod_other_buffers
    functions = functions_of(ctx, given, *about, joint_graph)
    assert functions.gradient is not None
    subtracted = subtracted_from_rows(ctx, out, grad_out, grad_logsumexp)
    for each in (grad_out, logsumexp):
        ctx.realise(each.box)
    batch, key_head, _, row, keys = given.place
    gradients = Gradients(
        given.at_row(grad_out, given.columns),
        given.at_row(logsumexp),
        given.at_row(subtracted),
        functions.gradient,
    )
    made = [
        destination(ctx, 0, query.sizes, (batch, given.head, row, given.summed), query.dtype),
        destination(ctx, 1, key.sizes, (batch, key_head, keys, given.summed), key.dtype),
        destination(ctx, 2, value.sizes, (batch, key_head, keys, given.columns), value.dtype),
    ]
    results = [place for place, _ in made]
    ctx.add(given.operation(functions.score, functions.allowed, results, ctx.origin, blocks, gradients))
    return [*(result for _, result in made), [None] * len(ctx.out[3])]


def subtracted_from_rows(ctx: Builder, out: Value, grad_out: Value, grad_logsumexp: Value | None) -> Value:
    """The sum of a row's gradients times its results: what the gradient of every weight of the row loses. A gradient of
    the logarithm of the sum, which is to base 2, goes with it."""

    def product(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        return op("mul", *(cast(each.at((*outer, *inner)), torch.float32) for each in (out, grad_out)))

    sizes = out.sizes[:3]
    (total,) = add_reduce(ctx, "sum", sizes, out.sizes[3:], [product], [torch.float32], out.device)
    assert total is not None
    if grad_logsumexp is None:
        return total
    value = op(
        "sub",
        ctx.elements(total, sizes),
        op("mul", cast(ctx.elements(grad_logsumexp, sizes), torch.float32), const(LOG2_E, torch.float32)),
    )
    found = ctx.lazy(sizes, value, out.device)
    ctx.realise(found.box)
    return found
