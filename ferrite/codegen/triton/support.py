"""Which operations have Triton source: asked before anything is scheduled, so that the others are calls."""

from __future__ import annotations

import torch

from ferrite.codegen.triton.operators import operation, type_name
from ferrite.errors import NotGenerated, Refusal
from ferrite.graph import HALVES
from ferrite.ir import STATES, Expr, Op, nodes_of, short
from ferrite.ir.program import Operation, Reduce, Scan, roots_of


def unsupported_operation(given: Operation) -> Refusal | None:
    """Why a loop operation has no Triton source; None where it has."""
    try:
        for item in nodes_of(*roots_of(given)):
            check(item)
        if isinstance(given, Reduce | Scan) and any(value.dtype in HALVES for value in given.values):
            return Refusal("16-bit floats are no numbers to a state before they are widened")
        if isinstance(given, Reduce):
            check_state(given)
        if isinstance(given, Scan):
            for item in nodes_of(*given.combine.results):
                check(item)
    except NotGenerated as error:
        return error.refusal
    return None


def check(item: Expr) -> None:
    type_name(item.dtype)
    if isinstance(item, Op):
        operation(lambda helper: None, item, ["x"] * len(item.operands))


def check_state(given: Reduce) -> None:
    if given.kind not in STATES:
        raise NotGenerated(f"no state for the reduction {given.kind}")
    dtype = torch.bool if given.kind in ("any", "all") else given.values[0].dtype
    if dtype.is_complex:
        raise NotGenerated(f"{given.kind} of {short(dtype)}")
    dtypes = (dtype, torch.int64) if given.kind.startswith("arg") else (dtype,) * STATES[given.kind].gives
    for item in nodes_of(*STATES[given.kind].combine(dtypes)):
        check(item)
