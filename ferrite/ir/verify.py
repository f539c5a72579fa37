"""The laws of a host program; a program that breaks one is a bug of the stage that made it.

L1  a name is bound once, by an input or one step
L2  a step reads only names bound before it and not yet freed
L3  only bound names are freed, each once
L4  outputs are bound and not freed
L5  names are Python identifiers, not keywords
"""

from __future__ import annotations

import keyword

from ferrite.ir.host import Free, HostProgram, binds, reads, references


class InvalidProgram(Exception):
    """A law is broken: a number of `ferrite.ir.verify`, or P1, P2 ... of `ferrite.ir.laws`, or K1, K2 ... of
    `ferrite.ir.kernel_laws`."""

    def __init__(self, law: int | str, message: str) -> None:
        super().__init__(f"law {law}: {message}")
        self.law = law


def verify(program: HostProgram) -> HostProgram:
    """The program itself, if it keeps every law. One pass, linear in its size."""
    live: set[str] = set()
    bound: set[str] = set()

    def bind(name: str) -> None:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidProgram(5, f"{name!r} is no identifier")
        if name in bound:
            raise InvalidProgram(1, f"{name} is bound twice")
        bound.add(name)
        live.add(name)

    def not_live(name: str) -> str:
        return f"{name} is {'freed already' if name in bound else 'not bound'}"

    for argument in program.inputs:
        bind(argument.name)
    for step in program.steps:
        freeing = isinstance(step, Free)
        for name in reads(step):
            if name not in live:
                raise InvalidProgram(3 if freeing else 2, f"{not_live(name)} at {step}")
            if freeing:
                live.remove(name)
        result = binds(step)
        if result is not None:
            bind(result)
    for name in references(*program.outputs):
        if name not in live:
            raise InvalidProgram(4, f"output {not_live(name)}")
    return program
