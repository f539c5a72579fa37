"""What attention means, in torch: all scores at once. The oracle for kernels that never have them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ferrite.ir.expr import Expr
from ferrite.ir.expr_interpret import Points
from ferrite.ir.index.algebra import Axis
from ferrite.ir.program.loop_operations import Attention, BlockList

# All points of some axes, with parameters of expressions there.
PointsOf = Callable[[Sequence[Axis], Sequence[torch.Tensor]], Points]


def attention_results(operation: Attention, points_of: PointsOf) -> list[torch.Tensor | None]:
    """One tensor for each destination that is wanted, over the axes that this one differs along."""
    return _Meaning(operation, points_of).results()


class _Meaning:
    def __init__(self, operation: Attention, points_of: PointsOf) -> None:
        self.operation, self.points_of = operation, points_of
        self.around = (*operation.axes, operation.group)
        self.score_axes = (*self.around, operation.rows, operation.keys)

    def over(self, axes: Sequence[Axis], value: Expr, *params: torch.Tensor) -> torch.Tensor:
        points = self.points_of(axes, params)
        return points.full(points(value))

    def matrix(self, value: Expr, rows: Axis, columns: Axis) -> torch.Tensor:
        found = self.over((*self.around, rows, columns), value)
        return found if found.dtype is torch.float64 else found.float()

    def results(self) -> list[torch.Tensor | None]:
        one = self.operation
        query, key = self.matrix(one.query, one.rows, one.summed), self.matrix(one.key, one.keys, one.summed)
        value = self.matrix(one.value, one.keys, one.columns)
        products = query @ key.mT
        scores, allowed = self.over(self.score_axes, one.score, products), self.allowed()
        scores = torch.where(allowed, scores, -math.inf)
        if one.gradients is None:
            found = self.forward(scores, value)
        else:
            found = self.backward(products, scores, allowed, query, key, value)
        wanted = [each is not None for each in one.destinations]
        return [result if is_wanted else None for result, is_wanted in zip(found, wanted, strict=True)]

    def forward(self, scores: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        if not scores.size(-1):
            nothing = scores.new_full(scores.shape[:-1], -math.inf)
            return [scores @ value, nothing, nothing]
        greatest = scores.amax(-1)
        weights = torch.where((greatest == -math.inf)[..., None], 0, scores.softmax(-1))
        return [weights @ value, scores.logsumexp(-1) / math.log(2), greatest / math.log(2)]

    def backward(
        self,
        products: torch.Tensor,
        scores: torch.Tensor,
        allowed: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> list[torch.Tensor]:
        one, more = self.operation, self.operation.gradients
        assert more is not None
        result = self.matrix(more.result, one.rows, one.columns)
        of_rows = (*self.around, one.rows)
        logarithm = self.over(of_rows, more.logarithm)[..., None] * math.log(2)
        weights = torch.where(logarithm == -math.inf, 0, torch.exp(scores - logarithm))
        gradients = weights * (result @ value.mT - self.over(of_rows, more.subtracted)[..., None])
        gradients = torch.where(allowed, self.over(self.score_axes, more.score, products, gradients), 0)
        group = len(one.axes)
        return [gradients @ key, (gradients.mT @ query).sum(group), (weights.mT @ result).sum(group)]

    # --- blocks -------------------------------------------------------------------------------------------------------

    def allowed(self) -> torch.Tensor:
        one = self.operation
        allowed = self.over(self.score_axes, one.allowed).clone()
        if not one.key_blocks and not one.row_blocks:
            return allowed
        rows, keys = one.block_sides
        looked, whole = (torch.zeros_like(allowed) for _ in range(2))
        # Lists for rows and for keys say the same; gradients of keys have only those.
        first = one.key_blocks or one.row_blocks
        for each in first:
            self.mark(each, whole if each.whole else looked, rows, keys, by_rows=bool(one.key_blocks))
        return whole | (looked & allowed)

    def mark(self, each: BlockList, marks: torch.Tensor, rows: int, keys: int, by_rows: bool) -> None:
        """Sets what lies in the blocks of a list."""
        one = self.operation
        mine = one.rows if by_rows else one.keys
        axes = (*self.around, mine)
        counts = self.over(axes, each.count)
        places = self.over((*axes, each.entry), each.place)
        side = keys if by_rows else rows
        marks = marks if by_rows else marks.mT
        others = torch.arange(marks.size(-1), device=marks.device) // side
        for entry in range(places.size(-1)):
            hit = (places[..., entry, None] == others) & (entry < counts)[..., None]
            marks |= hit
