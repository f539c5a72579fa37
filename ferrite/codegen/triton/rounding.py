"""Which values of a kernel need not be exact: those that are rounded to 16 bits before anything else is done with them.

Functions of such values may be the quick ones of a GPU, whose errors are far below the rounding.
"""

from __future__ import annotations

from ferrite.graph import HALVES
from ferrite.ir import Cast, Const, Expr, Local, Op, data_of, indices_of, nodes_of
from ferrite.ir.kernel import Accumulate, Attend, Kernel, Let, indices_in, values_of, walk


def all_are_rounded(kernel: Kernel) -> bool:
    """Whether a kernel for a GPU writes floats of 16 bits, and no others. Attention's scores are exponents, though: who
    prints them says what is exact enough there."""
    if any(isinstance(statement, Attend) for statement in walk(kernel.body)):
        return False
    written = [item.dtype for item in kernel.pointers if item.access != "read" and item.dtype.is_floating_point]
    return kernel.warps > 0 and bool(written) and all(dtype in HALVES for dtype in written)


def exact_values(kernel: Kernel) -> frozenset[Expr] | None:
    """The values of which some digit may be seen, where a kernel for a GPU rounds some of what it writes: all but those
    that are rounded to 16 bits before anything else is done with them."""
    rounds = any(item.dtype in HALVES and item.access != "read" for item in kernel.pointers)
    if not kernel.warps or not rounds or all_are_rounded(kernel):
        return None
    found: set[Expr] = set()
    names: set[str] = set()  # of values that a later statement wants exact

    def want(root: Expr) -> None:
        todo = [root]
        while todo:
            item = todo.pop()
            if item in found:
                continue
            found.add(item)
            if isinstance(item, Local):
                names.add(item.name)
            todo += [value for index in indices_of(item) for value in data_of(index)]
            todo += [] if isinstance(item, Cast) and item.dtype in HALVES else item.args

    statements = list(walk(kernel.body))
    results = {
        name for each in statements if isinstance(each, Accumulate) for state in each.states for name in state.names
    }
    for statement in reversed(statements):
        if isinstance(statement, Let) and statement.name not in names and statement.name not in results:
            value = statement.value
            if isinstance(value, Cast) and value.dtype in HALVES:
                found.add(value)
            continue
        for value in values_of(statement):
            want(value)
        for index in indices_in(statement):
            for value in data_of(index):
                want(value)
    return frozenset(found)


def powers_beside_one(kernel: Kernel) -> frozenset[Expr]:
    """Exponentials that one is added to, and nothing else is done with, as in a sigmoid that is written out: of those
    below 1e-38 nothing is left."""
    powers: set[Expr] = set()
    others: set[Expr] = set()
    for root in {value for statement in walk(kernel.body) for value in values_of(statement)}:
        others.add(root)
        for item in nodes_of(root):
            is_sum = isinstance(item, Op) and item.name == "add"
            is_beside = is_sum and any(isinstance(each, Const) and each.value == 1 for each in item.args)
            (powers if is_beside else others).update(item.under)
    return frozenset(item for item in powers - others if isinstance(item, Op) and item.name == "exp")
