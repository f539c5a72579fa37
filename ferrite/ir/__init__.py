"""The representations below FX, all of them frozen plain data.

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
