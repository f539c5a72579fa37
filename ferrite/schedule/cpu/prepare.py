"""Rewrites of a program before it is grouped: reductions in the form that loops like best.

- A softmax statistic is the greatest value, then the sum of exponentials relative to it: two passes over a row that is
  near in the caches cost less than keeping a sum up to date with a greatest value that still moves.
- A mean with squared deviations is a sum, then a sum: for the same reason, and it is more exact. The second corrects
  what was rounded in the first. Of many elements it is made of those of pieces that are near in the caches.
- The place of the greatest of many is found by blocks: see `ferrite.schedule.cpu.argmax_blocks`.
- A long reduction with few results is done in pieces, so that threads can share it. The pieces do not depend on how
  many threads there are: results are the same for every number of them.
- What reads a concatenation is split where its parts begin: see `ferrite.schedule.cpu.concats`.
- Images of convolutions have their channels side by side: see `ferrite.schedule.cpu.convolution_images`.
- Buffers that loops alone access get the order of dimensions of the tensors beside them: see
  `ferrite.schedule.cpu.buffer_layouts`.
- Heads that share keys are rows of one, where all of them are a block: see `ferrite.schedule.cpu.attention`.
- What reads a matrix product of our own goes over its rows: see `ferrite.schedule.loops.product_readers`.
- Products of torch are written into their part of a concatenation: see `ferrite.schedule.loops.out_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ferrite.ir import ZERO, Axis, Index, Number, axis, number, rewrite_indices
from ferrite.ir.program import Attention, Compute, Destination, Operation, Program, Reduce
from ferrite.machines import Machine
from ferrite.schedule.cpu.argmax_blocks import block_size, by_blocks
from ferrite.schedule.cpu.attention import refused
from ferrite.schedule.cpu.buffer_layouts import with_layouts
from ferrite.schedule.cpu.concats import split_readers
from ferrite.schedule.cpu.convolution_images import with_images
from ferrite.schedule.cpu.convolutions import is_tiled
from ferrite.schedule.cpu.products import is_product
from ferrite.schedule.fusion.accesses import likely, likely_points, step_of, upper_estimate
from ferrite.schedule.loops.attention import with_heads_as_rows
from ferrite.schedule.loops.out_products import with_out_products
from ferrite.schedule.loops.product_readers import with_whole_rows
from ferrite.schedule.loops.reductions import (
    EXTREME_OF,
    SPLIT_KINDS,
    Preparation,
    is_empty,
    pieces_of,
)
from ferrite.schedule.loops.windows import is_short

# How a sum is cut decides its rounding. So these are no numbers about a machine: values must not depend on that.
MAX_PIECES = 32  # however many threads there are
MIN_EQUAL_PIECES = 8  # with fewer, the last threads wait for the first: then there is a rest instead


def prepare(program: Program, machine: Machine) -> Program:
    """The program with the rewrites above, in this order; what it computes stays the same up to rounding."""
    program = CpuPreparation(program, machine).program(with_whole_rows(program, is_product))
    program, images = with_images(split_readers(program))
    return with_out_products(with_layouts(program, kept=images), "cpu")


class CpuPreparation(Preparation):
    def __init__(self, program: Program, machine: Machine) -> None:
        self.machine = machine
        near_elements = machine.l1_bytes // 4
        super().__init__(program, "cpu", near_elements, machine.max_split_results, machine.min_split_elements)

    def rewritten(self, operation: Operation) -> Iterator[Operation]:
        if isinstance(operation, Attention) and self.is_here(operation) and refused(operation) is None:
            yield with_heads_as_rows(operation, self.machine.attention_rows)
            return
        if isinstance(operation, Reduce) and operation.kind in EXTREME_OF and self.is_here(operation):
            across = self.across(operation)
            if (size := block_size(operation, across, self.machine)) is not None:
                yield from by_blocks(operation, size, across, self.made, self.loaded)
                return
        yield from super().rewritten(operation)

    def simpler(self, operation: Reduce) -> list[Compute | Reduce]:
        match operation.kind:
            case "softmax" if not is_empty(operation):  # nothing has no greatest value
                return self.softmax(operation)
            case "welford":
                return self.welford(operation)
        return [operation]

    def split(self, operation: Reduce) -> Iterator[Reduce]:
        results = likely_points(operation.axes)
        many = results * likely_points(operation.reduced)
        is_long = not is_short([item.extent for item in operation.reduced])
        if operation.kind not in SPLIT_KINDS or many < self.min_split_elements or is_tiled(operation) or not is_long:
            yield operation
            return
        cut = self.piece(operation)
        if cut is None or not (results < self.max_split_results or self.across(operation)):
            yield operation
            return
        longest, pieces = cut
        outer, inner, values = pieces_of(operation, longest, number(pieces))
        (destination,) = operation.destinations
        assert destination is not None
        rest = longest.extent % pieces
        every = axis(outer.name, pieces + (0 if rest is ZERO else 1))
        partial = self.made(operation, self.state_type(operation), (every,))

        def over(part: Axis) -> tuple[Axis, ...]:
            return tuple(part if item is longest else item for item in operation.reduced)

        def into(piece: Index) -> tuple[Destination]:
            return (Destination(partial.buffer, (piece, *operation.axes)),)

        axes = (outer, *operation.axes) if self.across(operation) else (*operation.axes, outer)  # as memory lies
        yield replace(operation, axes=axes, reduced=over(inner), values=values, destinations=into(outer))
        if rest is not ZERO:
            last = axis(f"{longest.name}_last", rest)
            values = tuple(rewrite_indices(item, {longest: inner.extent * pieces + last}) for item in operation.values)
            yield replace(operation, reduced=over(last), values=values, destinations=into(number(pieces)))
        yield replace(operation, reduced=(every,), values=(self.loaded(partial),), destinations=(destination,))

    def piece(self, operation: Reduce) -> tuple[Axis, int] | None:
        """The axis to cut, and into how many pieces: equal ones, with a rest where no good number divides the size."""
        longest = max(operation.reduced, key=lambda item: likely(item.extent), default=None)
        if longest is None:
            return None
        if isinstance(longest.extent, Number):  # the slowest that is long enough: each piece then lies in one place
            places = [access.place for access in self.buffer_table.accesses(operation) if not access.writes]
            enough = [
                item
                for item in operation.reduced
                if upper_estimate(item.extent, 0) >= min(MAX_PIECES, longest.extent.value)
            ]
            longest = max(enough, key=lambda item: max((likely(step_of(at, item) or ZERO) for at in places), default=0))
        size = likely(longest.extent)
        pieces = min(MAX_PIECES, size)
        if isinstance(longest.extent, Number):
            pieces = next((count for count in range(pieces, MIN_EQUAL_PIECES - 1, -1) if size % count == 0), pieces)
        return (longest, pieces) if pieces >= 4 else None
