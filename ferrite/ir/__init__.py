"""The representations below FX, all of them frozen plain data.

`program`: what a graph computes: buffers, and operations in order, over scalar expressions (`expr`) and index
arithmetic (`index`). `laws` are its laws, `text` and `parse` its text, `interpret` its meaning.
`kernel`: how a piece of a program is computed: loops, tiles, accumulators. `kernel_laws`, `kernel_text`, `kernel_parse`
and `run_kernel` are the same for kernels; `canonical` makes equal ones equal.
`host`: the program that runs in Python around the kernels. Made by `lower`, printed by `codegen`. A program that
passes `verify` may be printed and run.
"""

from ferrite.ir.host import (
    Allocate,
    Argument,
    Bind,
    Call,
    Constant,
    Evaluate,
    Free,
    HostProgram,
    Input,
    Literal,
    Mapping,
    Ref,
    Restride,
    Sequence,
    Slice,
    Step,
    references,
)
from ferrite.ir.index import Index  # before its parts, `sums` and `division`, which build on it
from ferrite.ir.verify import verify

__all__ = [
    "Allocate",
    "Argument",
    "Bind",
    "Call",
    "Constant",
    "Evaluate",
    "Free",
    "HostProgram",
    "Index",
    "Input",
    "Literal",
    "Mapping",
    "Ref",
    "Restride",
    "Sequence",
    "Slice",
    "Step",
    "references",
    "verify",
]
