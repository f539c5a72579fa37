"""One operation as a program of its own, for the interpreter: what no kernel was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ferrite.ir import ZERO, Symbol
from ferrite.ir.program import Buffer, Input, Operation, Program, reads, symbols, writes


def small_program(operation: Operation, buffers: Mapping[str, Buffer]) -> Program:
    """Its inputs are the symbols and buffers that the operation needs; what it writes, it writes in place."""
    names = sorted({access.buffer for access in (*reads(operation), *writes(operation))})
    given = [replace(buffers[name], kind="input", base=None, offset=ZERO) for name in names]
    needed = set(symbols(operation))
    for buffer in given:
        for size in (*buffer.sizes, *buffer.strides):
            needed |= {atom for atom in size.atoms if isinstance(atom, Symbol)}
    inputs: tuple[Input, ...] = (*sorted(needed, key=lambda item: item.name), *names)
    return Program("operation", inputs, tuple(given), (operation,), ())
