"""Operators whose results lie in memory otherwise than torch forecasts, where their operands are not contiguous.

Loops write a result as the forecast says. These are called in eager then, so that their results have eager's strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

# Eager goes by the order of the operands' strides, the forecast by something else where they differ.
BY_ALL_OPERANDS = frozenset({aten.copysign, aten.div, aten.floor_divide, aten.xlogy, aten.native_dropout_backward})
# One operand decides.
BY_ONE_OPERAND = frozenset({aten.roll, aten.channel_shuffle, aten.log_sigmoid_forward, aten.max_unpool2d})
# The same, but channels last are forecast right.
BY_CHANNELS = frozenset(
    {
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._batch_norm_with_update,
        aten._batch_norm_with_update_functional,
    }
)
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def misforecast(target: Any, operands: Sequence[torch.Tensor]) -> str | None:
    """Why a result would not have eager's strides; None where it has."""
    packet = getattr(target, "overloadpacket", None)
    if packet in BY_ALL_OPERANDS:
        wrong = target is not aten.div.Tensor and len({each.stride() for each in operands if each.dim()}) > 1
    elif packet in BY_ONE_OPERAND:
        wrong = not all(each.is_contiguous() for each in operands)
    elif packet in BY_CHANNELS:
        wrong = not all(map(has_a_memory_format, operands))
    else:
        return None
    return "torch forecasts other strides for its result than it has" if wrong else None


def has_a_memory_format(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    memory_format = MEMORY_FORMATS.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)
