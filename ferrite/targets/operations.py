"""Why a loop operation cannot be a kernel, whatever prints it."""

from __future__ import annotations

from collections.abc import Callable

from ferrite.codegen.llvm import is_narrow
from ferrite.ir import STATES, Expr
from ferrite.ir.program import Operation, Reduce, Scan, roots_of
from ferrite.schedule.cpu import has_state


def unsupported_reason(unsupported: Callable[[Expr], str | None], operation: Operation) -> str | None:
    """None where it can. `unsupported`: why a printer has no form for a value."""
    for root in roots_of(operation):
        why = unsupported(root)
        if why:
            return why
    if isinstance(operation, Scan) and not has_state(operation):
        return f"no state for the scan {operation.combine.name}"
    if isinstance(operation, Reduce | Scan) and any(is_narrow(value.dtype) for value in operation.values):
        return "16-bit floats are no numbers to a state before they are widened"
    if isinstance(operation, Reduce) and operation.kind not in STATES:
        return f"no state for the reduction {operation.kind}"
    return None
