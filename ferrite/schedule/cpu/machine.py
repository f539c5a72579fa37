"""What the scheduler knows of the machine: plain numbers, so that a schedule can be made for another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """`vector`: bytes of a register; `near` and `mid`: bytes of the caches that one thread has for itself."""

    vector: int = 16
    near: int = 1 << 15
    mid: int = 1 << 19
    # A loop is spread over threads when each has about this many additions to do: waking one costs some microseconds.
    grain: int = 1 << 17

    def lanes(self, *dtypes: torch.dtype) -> int:
        """How many elements one vector instruction handles where values of these types are computed."""
        widest = max((dtype.itemsize for dtype in dtypes), default=4)
        return max(self.vector // max(widest, 1), 1)
