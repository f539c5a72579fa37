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
    """A law of `ferrite.ir.verify` is broken."""


def verify(program: HostProgram) -> HostProgram:
    """The program itself, if it keeps every law. One pass, linear in its size."""
    live: set[str] = set()
    bound: set[str] = set()

    def bind(name: str) -> None:
        require(name.isidentifier() and not keyword.iskeyword(name), 5, f"{name!r} is no identifier")
        require(name not in bound, 1, f"{name} is bound twice")
        bound.add(name)
        live.add(name)

    for argument in program.inputs:
        bind(argument.name)
    for step in program.steps:
        law = 3 if isinstance(step, Free) else 2
        for name in reads(step):
            require(name in live, law, f"{name} is {'freed' if name in bound else 'not bound'} at {step}")
            if isinstance(step, Free):
                live.remove(name)
        result = binds(step)
        if result is not None:
            bind(result)
    for name in references(*program.outputs):
        require(name in live, 4, f"output {name} is {'freed' if name in bound else 'not bound'}")
    return program


def require(holds: bool, law: int, message: str) -> None:
    if not holds:
        raise InvalidProgram(f"law {law}: {message}")
