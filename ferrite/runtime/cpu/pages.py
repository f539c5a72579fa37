"""Large pages for large results.

Memory of 32 MB or more comes fresh from the system at every call: allocators give it back when it is freed. Each page
of it is made when it is first written to, which may take longer than to compute what is written. Linux makes pages of
2 MB instead of 4 KB where it is asked to, 512 times as few.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from ferrite.capture import torch_runtime

HUGE_PAGES = 14  # the advice, as Linux numbers it
PAGE_BYTES = 4096


def large_on_cpu(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As `empty_on_cpu`, with large pages. A system that has none says so, and nothing is lost."""
    tensor = torch_runtime.empty_on_cpu(sizes, strides, dtype)
    start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    # `untyped_storage()` would count as a user of the memory from then on: autograd would add nothing to it in place
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    end = (tensor.data_ptr() + reach * dtype.itemsize) // PAGE_BYTES * PAGE_BYTES
    if end > start:
        _advise(start, end - start, HUGE_PAGES)
    return tensor


def _advice() -> Any:
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


if sys.platform == "linux":
    _advise = _advice()
else:
    large_on_cpu = torch_runtime.empty_on_cpu
