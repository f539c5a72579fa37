"""What happens to the scores, as a factor and a bias: factor * (query @ key) + bias.

Scales go into the factor, masks into the bias. A fill becomes part of the bias, too: a score that is added to minus
infinity, or to the lowest number there is, leaves no trace. Fills with a number less far away are refused.

What would differ from eager are the rows of which nothing is left:

- All scores of a row are minus infinity: a softmax gives nan, scaled_dot_product_attention zeros. Such rows of the bias
  become nan. That gives eager's result and, for a mask that is added, eager's gradients.
- All scores are overwritten: in eager they get no gradient.
- All have the lowest number added: in eager they weigh the same and get a gradient, but kernels that compute the
  weights a second time, to go backward, cannot tell one from all in numbers that low.

So for training the last two are computed apart (`hidden` says how), and it must be known what a mask can hold. Scores
that are infinite because a query or a key is are not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.passes.attention.constants import values_of
from ferrite.passes.attention.found import Add, Attention, Change, Fill, Node, Refused, Scale, TensorScale
from ferrite.passes.attention.operands import Operands, same_shape

aten = torch.ops.aten
# Nothing that a score can be changes this number when it is added to it.
FAR = -1e30
LOWEST_HALF = torch.finfo(torch.float16).min
LOWEST = torch.finfo(torch.float32).min
# What a row of which nothing is left gives while training: what attention makes of it, the mean of the values, the mean
# with a gradient for the scores, nan.
Hidden = Literal["", "mean", "mean of scores", "nan"]


class Bias:
    """`batch` is that of the attention to come, `dtype` its type."""

    def __init__(self, found: Attention, operands: Operands, batch: Sequence[Any], dtype: torch.dtype) -> None:
        self.operands, self.call = operands, operands.call
        self.batch, self.dtype = batch, dtype
        self.factor = 1.0
        self.scales: list[TensorScale] = []  # tensors that the queries are to be multiplied by
        self.node: Node | None = None
        self.low = 0.0  # no element is below
        self.fills = [change for _, change in found.scores if isinstance(change, Fill)]
        self.masks = [change for _, change in found.scores if isinstance(change, Add)]
        self.safe = found.softmax.safe
        # if one mask alone may hold minus infinity it is mended before it is broadcast to others
        endless = [mask for mask in self.masks if lowest_of(mask) == -math.inf]
        filled = any(fill.value == -math.inf for fill in self.fills)
        self.alone = endless[0] if len(endless) == 1 and not filled and not self.safe else None
        for node, change in found.scores:
            self.apply(node, change)

    def apply(self, node: Node, change: Change) -> None:
        if isinstance(change, Scale):
            self.scale(change)
        elif isinstance(change, TensorScale):
            self.scale_by_tensor(node, change)
        elif isinstance(change, Add):
            self.add(node, change)
        elif isinstance(change, Fill):
            self.fill(node, change)

    # --- rows of which nothing is left --------------------------------------------------------------------------------

    @property
    def may_be_endless(self) -> bool:
        """Whether a row can be all minus infinity, and that makes a difference."""
        return self.node is not None and not self.safe and self.low < LOWEST

    def hidden(self) -> Hidden:
        """What rows give, while training, of which nothing is left."""
        if self.low == -math.inf and self.scales and self.node is not None:
            raise Refused("what the scale makes of the mask is not known, and gradients tell")
        far = [far_values(mask) for mask in self.masks]
        hiding = [values for values in far if values]
        fills = {fill.value for fill in self.fills}
        if bool(fills) + len(hiding) > 1 or len(fills) > 1 or any(len(values) > 1 for values in hiding):
            raise Refused("scores are hidden in more than one way, and gradients tell them apart")
        if fills:
            return "mean" if fills != {-math.inf} else "" if self.safe else "nan"
        return "mean of scores" if hiding and hiding[0] != {-math.inf} else ""

    def hidden_rows(self) -> Node:
        return self.call(aten.all.dim, self.call(aten.le.Scalar, self.node, FAR), -1, True)

    def mended(self, mask: Node) -> Node:
        """Rows of minus infinity as nan."""
        hidden = self.call(aten.all.dim, self.call(aten.eq.Scalar, mask, -math.inf), -1, True)
        return self.call(aten.masked_fill.Scalar, mask, hidden, math.nan)

    # --- one change each ----------------------------------------------------------------------------------------------

    def scale(self, change: Scale) -> None:
        self.factor *= change.factor
        if self.node is not None:
            self.node = self.call(aten.mul.Tensor, self.node, change.factor)
            self.low = self.low * change.factor if change.factor > 0 else -math.inf

    def scale_by_tensor(self, node: Node, change: TensorScale) -> None:
        scale = fake_value(change.tensor)
        if scale.dim() and not torch_api.known_equal(scale.shape[-1], 1):
            raise Refused("the scale varies along the keys")
        one_number = scale.dim() <= 4 and torch_api.known_equal(scale.numel(), 1)
        if not one_number and not same_shape(fake_value(node).shape[:-2], self.batch):
            raise Refused("the scale has another batch than the scores")
        if self.node is not None and not one_number:
            raise Refused("it would make the mask as large as the scores")
        if self.node is not None:
            self.node = self.call(change.operator, self.node, change.tensor)
            self.low = -math.inf
        self.scales.append(change)

    def add(self, node: Node, change: Add) -> None:
        if not fake_value(change.mask).is_floating_point():
            raise Refused("the mask that is added is not of a floating-point type")
        mask = self.in_batch(change.mask, node)
        if change.negated:
            mask = self.call(aten.neg.default, mask)
        if change is self.alone:
            mask = self.mended(mask)
        else:
            self.low += lowest_of(change)
        self.node = mask if self.node is None else self.call(aten.add.Tensor, self.node, mask)

    def fill(self, node: Node, change: Fill) -> None:
        value, scores = change.value, fake_value(node)
        dtype = self.dtype if self.node is None else fake_value(self.node).dtype
        if scores.dtype is torch.float16 and value == LOWEST_HALF:
            # in half precision even the lowest number is not far: attention adds to it in single precision
            value, dtype = LOWEST, torch.float32
        elif not value <= FAR:
            raise Refused(f"scores are filled with {value}, which is not far below all others")
        elif value != -math.inf and value < torch.finfo(dtype).min:
            raise Refused(f"scores are filled with {value}, which {dtype} does not hold")
        if fake_value(change.condition).dtype is not torch.bool:
            raise Refused("what scores are filled by is no condition")
        condition = self.in_batch(change.condition, node)
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

    def in_batch(self, mask: Node, at: Node) -> Node:
        """A mask that was broadcast to the scores at some node, for scores with the batch that attention has."""
        value, scores = fake_value(mask), fake_value(at)
        if not value.dim():
            raise Refused("the mask is one number")
        own = [1] * (scores.dim() - value.dim()) + list(value.shape)
        if same_shape(scores.shape[:-2], self.batch):
            for _ in range(4 - value.dim()):
                mask = self.call(aten.unsqueeze.default, mask, 0)
            return mask
        if all(torch_api.known_equal(size, 1) for size in own[:-2]):
            return self.operands.reshaped(mask, [1, 1, *own[-2:]])
        if same_shape(own[:-2], scores.shape[:-2]):
            return self.operands.reshaped(mask, [*self.batch, *own[-2:]])
        raise Refused("the mask is broadcast along a part of the batch that is flattened elsewhere")


def mask_values(mask: Add) -> frozenset[float] | None:
    values = values_of(mask.mask)
    return frozenset(-value for value in values) if mask.negated and values is not None else values


def lowest_of(mask: Add) -> float:
    """What a mask makes scores lower by at most; minus infinity where nobody knows."""
    values = mask_values(mask)
    return -math.inf if values is None else min(0.0, *values)


def far_values(mask: Add) -> set[float]:
    values = mask_values(mask)
    if values is None:
        raise Refused("what the mask hides is not known, and gradients tell")
    return {value for value in values if value <= FAR}
