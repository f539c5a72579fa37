"""What a code generator says of kernels that it cannot make."""

from __future__ import annotations

from collections.abc import Mapping


class RefusedKernels(Exception):
    """Of the kernels it was given, these have no code: why, by their places. What they compute is done without."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons
