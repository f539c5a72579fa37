"""What happens to the scores, as a factor and a bias: factor * (query @ key) + bias.

Scales go into the factor, masks into the bias. A fill becomes part of the bias, too: a score that is added to minus
infinity, or to the lowest number there is, leaves no trace. Fills with a number less far away are refused.

Where all scores of a row are minus infinity a softmax gives nan, and scaled_dot_product_attention zeros: such rows of
the bias become nan. While training the mask is looked at when it is there (see `operators`), and is left as it is.
Scores that are infinite because a query or a key is are not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import fake_value, same_sizes
from ferrite.passes.shared.attention.constants import ConstantValues
from ferrite.passes.shared.attention.found import Add, Change, Fill, FoundAttention, Node, Scale, is_tensor
from ferrite.passes.shared.attention.operands import Operands
from ferrite.passes.shared.attention.operators import LOW_BIAS, MASKED_BIAS

aten = torch.ops.aten
LOWEST_HALF = torch.finfo(torch.float16).min
LOWEST = torch.finfo(torch.float32).min


class Bias:
    """`batch` is that of the attention to come, `dtype` its type; `mend`: rows of minus infinity become nan."""

    def __init__(
        self, found: FoundAttention, operands: Operands, batch: Sequence[Any], dtype: torch.dtype, mend: bool
    ) -> None:
        self.operands, self.call = operands, operands.call
        self.constants = ConstantValues(operands.site.written)
        self.inside = frozenset(found.inside)
        self.batch, self.dtype = batch, dtype
        self.factor = 1.0
        self.scales: list[tuple[Any, Node]] = []  # what the queries are to be multiplied or divided by
        self.node: Node | None = None
        self.filled: Node | None = None  # which scores are overwritten
        self.low = 0.0  # no element of the bias is below
        changes = [change for _, change in found.scores]
        # if one mask alone may hold minus infinity it is mended before it is broadcast to others
        masks = [change for change in changes if isinstance(change, Add) and is_tensor(change.mask)]
        endless = [mask for mask in masks if self.lowest(mask) == -math.inf]
        filled = any(
            isinstance(change, Fill) and self.constants.number(change.value) == -math.inf for change in changes
        )
        self.alone = endless[0] if mend and len(endless) == 1 and not filled else None
        self.trains = any(fake_value(mask.mask).requires_grad for mask in masks)
        for node, change in found.scores:
            self.apply(node, change)
        if mend:
            self.mend()

    def apply(self, node: Node, change: Change) -> None:
        if isinstance(change, Scale):
            factor = self.constants.number(change.by)
            if factor is None:
                self.scale_by_tensor(node, change)
            elif not change.divides:
                self.scale(factor)
            elif factor:
                self.scale(1 / factor)
            else:
                raise NotApplied("the scores are divided by zero")
        elif isinstance(change, Add):
            self.add(node, change)
        elif isinstance(change, Fill):
            self.fill(node, change)

    @property
    def may_hide_rows(self) -> bool:
        return self.low <= LOW_BIAS

    def mend(self) -> None:
        if self.node is not None and self.low < LOWEST:
            self.node = self.mended(self.node)

    def mended(self, mask: Node) -> Node:
        """Rows of minus infinity as nan."""
        hidden = self.call(aten.all.dim, self.call(aten.eq.Scalar, mask, -math.inf), -1, True)
        return self.call(aten.masked_fill.Scalar, mask, hidden, math.nan)

    def tensor(self, item: Any, what: str) -> Node:
        """An argument that is read: a tensor, and none that is made of the scores."""
        if not isinstance(item, Node) or not is_tensor(item):
            raise NotApplied(f"{what} is known only when it runs, or no tensor")
        if item in self.inside:
            raise NotApplied(f"{what} is made of the scores themselves")
        return item

    # --- one change each ----------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        self.factor *= factor
        if self.node is not None and factor != 1:
            self.node = self.call(aten.mul.Tensor, self.node, factor)
            self.low = self.low * factor if factor > 0 else -math.inf

    def scale_by_tensor(self, node: Node, change: Scale) -> None:
        tensor = self.tensor(change.by, "the scale")
        target = aten.div.Tensor if change.divides else aten.mul.Tensor
        scale = fake_value(tensor)
        if scale.dim() and not torch_api.known_equal(scale.shape[-1], 1):
            raise NotApplied("the scale varies along the keys")
        one_number = scale.dim() <= 4 and torch_api.known_equal(scale.numel(), 1)
        if not one_number and not same_sizes(fake_value(node).shape[:-2], self.batch):
            raise NotApplied("the scale has another batch than the scores")
        if self.node is not None and not one_number:
            raise NotApplied("it would make the mask as large as the scores")
        if self.node is not None:
            self.node = self.call(target, self.node, tensor)
            self.low = -math.inf
        self.scales.append((target, tensor))

    def add(self, node: Node, change: Add) -> None:
        if change.times == 0:
            return
        mask = self.tensor(change.mask, "what is added")
        if not fake_value(mask).is_floating_point():
            raise NotApplied("the mask that is added is not of a floating-point type")
        if not isinstance(change.times, (int, float)):
            raise NotApplied("how often the mask is added is known only when it runs")
        mask = self.in_batch(mask, node)
        if change.times != 1:
            mask = self.call(aten.mul.Tensor, mask, change.times)
        if change is self.alone:
            mask = self.mended(mask)
        else:
            self.low += self.lowest(change)
        self.node = mask if self.node is None else self.call(aten.add.Tensor, self.node, mask)

    def fill(self, node: Node, change: Fill) -> None:
        value, scores = self.constants.number(change.value), fake_value(node)
        dtype = self.dtype if self.node is None else fake_value(self.node).dtype
        if value is None:
            raise NotApplied("what scores are filled with is not known")
        if scores.dtype is torch.float16 and value == LOWEST_HALF:
            # in half precision even the lowest number is not far: attention adds to it in single precision
            value, dtype = LOWEST, torch.float32
        elif not value <= MASKED_BIAS:
            raise NotApplied(f"scores are filled with {value}, which is not far below all others")
        elif value != -math.inf and value < torch.finfo(dtype).min:
            raise NotApplied(f"scores are filled with {value}, which {dtype} does not hold")
        condition = self.tensor(change.condition, "the condition")
        if fake_value(condition).dtype is not torch.bool:
            raise NotApplied("what scores are filled by is no condition")
        condition = self.in_batch(condition, node)
        others = self.node
        if others is None:
            device = fake_value(condition).device
            others = self.call(aten.scalar_tensor.default, 0.0, dtype=dtype, device=device)
        elif fake_value(others).dtype != dtype:
            others = self.call(aten._to_copy.default, others, dtype=dtype)
        if change.when:
            self.node = self.call(aten.where.ScalarSelf, condition, value, others)
        else:
            self.node = self.call(aten.where.ScalarOther, condition, others, value)
        self.low = min(self.low, value)
        overwritten = condition if change.when else self.call(aten.logical_not.default, condition)
        several = self.filled is not None
        self.filled = self.call(aten.logical_or.default, self.filled, overwritten) if several else overwritten

    def in_batch(self, mask: Node, at: Node) -> Node:
        """A mask that was broadcast to the scores at some node, for scores with the batch that attention has."""
        value, scores = fake_value(mask), fake_value(at)
        if not value.dim():
            raise NotApplied("the mask is one number")
        own = [1] * (scores.dim() - value.dim()) + list(value.shape)
        if same_sizes(scores.shape[:-2], self.batch):
            for _ in range(4 - value.dim()):
                mask = self.call(aten.unsqueeze.default, mask, 0)
            return mask
        if all(torch_api.known_equal(size, 1) for size in own[:-2]):
            return self.operands.reshaped(mask, [1, 1, *own[-2:]])
        if same_sizes(own[:-2], scores.shape[:-2]):
            return self.operands.reshaped(mask, [*self.batch, *own[-2:]])
        raise NotApplied("the mask is broadcast along a part of the batch that is flattened elsewhere")

    def lowest(self, mask: Add) -> float:
        """What a mask makes scores lower by at most; minus infinity where nobody knows."""
        values = self.constants.values(mask.mask)
        if values is None or not isinstance(mask.times, (int, float)):
            return -math.inf
        return min(0.0, *(value * mask.times for value in values))
