"""What a code generator says of kernels that it cannot make."""

from __future__ import annotations

from collections.abc import Mapping

from ferrite.errors import Refusal


class RefusedKernels(Exception):
    """Of the kernels it was given, these have no code: why, by their places. What they compute is done without."""

    def __init__(self, reasons: Mapping[int, Refusal]) -> None:
        super().__init__("; ".join(refusal.reason for refusal in reasons.values()))
        self.reasons = reasons
