"""Calls of operators as problems, where a library offers another operator in their place: plain data, with a text.

call mylib.mm.default for aten.mm.default: bf16[8, 64]; bf16[64, 32] strides (1, 64)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, order=True)
class CallProblem:
    """Operators by their names; `operands`: what each looks like, a tensor as above, anything else as Python has it."""

    candidate: str
    operator: str
    operands: tuple[str, ...]

    PATTERN: ClassVar = re.compile(r"call (\S+) for (\S+): (.*)")

    def __str__(self) -> str:
        return f"call {self.candidate} for {self.operator}: {'; '.join(self.operands)}"

    @staticmethod
    def parsed(text: str) -> CallProblem | None:
        found = CallProblem.PATTERN.fullmatch(text)
        return None if found is None else CallProblem(found[1], found[2], tuple(found[3].split("; ")))


@dataclass(frozen=True)
class CallTimes:
    """Microseconds of torch's operator, and of the other one."""

    torch: float
    ours: float

    @property
    def how(self) -> str:
        return "the candidate"
