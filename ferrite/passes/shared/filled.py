"""Calls that make a tensor of one number, spelled as torch and as ATen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten = torch.ops.aten

# Which positional argument is the number, and how it may be named.
FILLED: Mapping[Any, int] = {
    **dict.fromkeys((torch.full, torch.full_like, aten.full.default, aten.full_like.default), 1),
    **dict.fromkeys((torch.tensor, torch.scalar_tensor, aten.scalar_tensor.default), 0),
    "new_full": 2,
}
NUMBER_NAMES = ("fill_value", "data", "s")
ZEROS = frozenset({torch.zeros, torch.zeros_like, aten.zeros.default, aten.zeros_like.default, "new_zeros"})
ONES = frozenset({torch.ones, torch.ones_like, aten.ones.default, aten.ones_like.default, "new_ones"})
# Calls that put one number where a mask says so.
FILLS = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
