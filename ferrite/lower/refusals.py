"""Calls that eager refuses although a loop could be made of them: they are made in eager, for its error.

Torch's pictures of tensors do not tell: the types that a kernel knows are checked where it runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.ir import short

aten = torch.ops.aten


FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
# The types that kernels of eager know, of their first tensor, where a loop would know more.
KNOWN = {
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d": FLOATS,
    "avg_pool1d avg_pool2d avg_pool3d": FLOATS | {torch.int64},
    "max_pool2d_with_indices max_pool3d_with_indices": FLOATS | WHOLE,
}
TYPES = {
    getattr(aten, name).default: types
    for names, types in KNOWN.items()
    for name in names.split()
    if hasattr(aten, name)
}


def refusal(target: Any, dtype: torch.dtype | None) -> Refusal | None:
    """Why eager refuses a call, by the type of its first tensor: refusal(aten.adaptive_max_pool2d.default, int64)."""
    accepted = TYPES.get(target)
    if accepted is not None and dtype is not None and dtype not in accepted:
        return Refusal(f"eager has no kernel of it for {short(dtype)}")
    return None
