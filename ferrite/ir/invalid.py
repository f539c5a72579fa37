"""What is wrong with a program: the law that it breaks."""

from __future__ import annotations


class InvalidProgram(Exception):
    """A law is broken: P1, P2 ... of `ferrite.ir.program.laws`, K1, K2 ... of `ferrite.ir.kernel.laws`, S1, S2 ... of
    `ferrite.schedule.laws`, or H1, H2 ... of `ferrite.codegen.host.laws`."""

    def __init__(self, law: str, message: str) -> None:
        super().__init__(f"law {law}: {message}")
        self.law = law
