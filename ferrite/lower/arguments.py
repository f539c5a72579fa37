"""Values of Python as source text, where they have one."""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch

from ferrite.capture import torch_api


def literal_text(value: Any) -> str | None:
    """Python source that makes an equal value; None where there is none.

    >>> literal_text(float("-inf")), literal_text(-0.0), literal_text(torch.float32)
    ("float('-inf')", '-0.0', 'torch.float32')
    """
    kind = type(value)
    if value is None or value is Ellipsis or kind in (bool, int, str):
        return "..." if value is Ellipsis else repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind is complex:
        if cmath.isfinite(value):
            return repr(value)
        return f"complex({literal_text(value.real)}, {literal_text(value.imag)})"
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if kind is torch.device:
        return f"torch.device({str(value)!r})"
    name = torch_api.operator_name(value)
    return f"torch.ops.{name}" if name is not None else None
