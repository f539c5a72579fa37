"""What Triton's interpreter lacks or gets wrong, computed with torch: functions of CUDA's library, and conversions to
and from bfloat16, which it truncates. Compiled source does not come here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from ferrite.ir.scalar import OPERATORS

OTHER_NAMES = {"rint": "round"}


def _tensor(value: Any) -> torch.Tensor:
    data = numpy.ascontiguousarray(value.handle.data)
    if value.dtype == tl.bfloat16:
        return torch.from_numpy(data.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


def _block(result: torch.Tensor, *like: Any) -> Any:
    """A block of Triton's, or a number where all that it comes from are."""
    if result.dtype is torch.bfloat16:
        dtype, data = tl.bfloat16, result.view(torch.int16).numpy().view(numpy.uint16)
    else:
        dtype, data = {torch.float32: tl.float32, torch.float64: tl.float64}[result.dtype], result.numpy()
    whole = any(value.type.is_block() for value in like)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if whole else dtype)


class _Library:
    """`libdevice`: every function is what the scalar operator of its name means."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        meaning = OPERATORS[OTHER_NAMES.get(name, name)].meaning
        return lambda *args: _block(meaning(*map(_tensor, args)), *args)


def _to_bfloat16(value: Any) -> Any:
    return _block(_tensor(value).to(torch.bfloat16), value)


def _from_bfloat16(value: Any) -> Any:
    return _block(_tensor(value).to(torch.float32), value)


REPLACED: dict[str, Any] = {
    "libdevice": _Library(),
    "to_bfloat16": _to_bfloat16,
    "from_bfloat16": _from_bfloat16,
}
