"""Calls that write a tensor over a view of another, and which of them eager refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

# The view that each of them writes over. All take the arguments of the view behind the two tensors.
VIEW_SCATTERS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}


def eager_refuses(operator: Any, base: Sequence[Any], source: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether a tensor of these sizes does not fit the view that the arguments name, or there is no such view: tracing
    does not look. What is said in symbols is taken for good."""
    if operator is aten.as_strided_scatter.default:  # tracing looks there
        return False
    if any(type(item) is not int for item in (*base, *source)) or not all(type(g) in (int, type(None)) for g in given):
        return False
    try:
        view = VIEW_SCATTERS[operator](torch.empty(tuple(base), device="meta"), *given)
    except (IndexError, RuntimeError):
        return True
    return tuple(view.shape) != tuple(source)
