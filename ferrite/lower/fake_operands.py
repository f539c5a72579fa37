"""What the fake value of an operand says of a tensor like it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_OPERAND_ELEMENTS = 1 << 18  # elements of an operand, with those it skips: a call takes well under a millisecond


def is_plain(value: torch.Tensor) -> bool:
    """Whether strides tell where its elements lie, and eager is asked on a processor."""
    return value.device.type == "cpu" and is_as_in_memory(value)


def is_as_in_memory(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def is_static(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and all(type(number) is int for number in (*value.shape, *value.stride()))


def is_small(value: torch.Tensor) -> bool:
    """Whether a tensor like it can be made here and now."""
    return extent(value) <= MAX_OPERAND_ELEMENTS and math.prod(value.shape) <= MAX_OPERAND_ELEMENTS


def extent(value: torch.Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: (6, 1, 2) has (2, 2, 1)."""
    return tuple(math.prod(max(size, 1) for size in sizes[place + 1 :]) for place in range(len(sizes)))
