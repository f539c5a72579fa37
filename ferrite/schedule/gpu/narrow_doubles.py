"""Doubles that hold nothing but numbers of 32 bits, as these.

    squares: f64[c] = cast(s[c])        v = cast(squares[c] / f64(802816.0))        =>      v = s[c] / f32(802816.0)

Statistics are lowered in double precision, which a processor has for nothing; a GPU divides them in forty instructions,
at every element that reads them. A sum, product, quotient or root of numbers of 32 bits that is rounded to 53 bits, and
then to 24, is the one that is rounded to 24 at once. What is made of sizes alone, as the number of elements of a mean
is, is rounded to 24 bits before it divides, as eager does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ferrite.ir import OPERATORS, Cast, Const, Expr, Load, Op, Symbol, cast, const, nodes_of, op, rewrite_nodes
from ferrite.ir.program import Compute, Operation, Program, Reduce, Store, reads, writes
from ferrite.schedule.loops.conditions import known_value

ROUNDED_ALIKE = ("add", "sub", "mul", "div", "sqrt")
FOLDED = (*ROUNDED_ALIKE, "maximum", "minimum")
NARROW, WIDE = torch.float32, torch.float64


def with_narrow_doubles(program: Program, device: str) -> Program:
    narrow = narrow_buffers(program, device)

    def simpler(item: Expr) -> Expr:
        if isinstance(item, Load) and item.buffer in narrow:
            return cast(Load.intern(item.buffer, item.coordinates, NARROW), WIDE)
        return folded(known_value(item))

    operations = tuple(rewritten(each, simpler, narrow) for each in program.operations)
    buffers = tuple(replace(each, dtype=NARROW) if each.name in narrow else each for each in program.buffers)
    return replace(program, buffers=buffers, operations=operations)


def narrow_buffers(program: Program, device: str) -> frozenset[str]:
    """Memory of the program's own for doubles, all of which were numbers of 32 bits."""
    found = {
        each.name
        for each in program.buffers
        if each.kind == "owned" and each.dtype is WIDE and each.device.type == device
    }
    found -= {name for name in program.outputs if isinstance(name, str)}
    found -= {each.base for each in program.buffers if each.base is not None}
    for operation in program.operations:
        if not found:
            break
        if not isinstance(operation, Compute | Reduce):
            found -= {access.buffer for access in (*reads(operation), *writes(operation))}
        elif isinstance(operation, Compute):
            found -= {each.buffer for each in operation.stores if not is_narrow_store(each)}
        elif any(value.dtype is not NARROW for value in operation.values):
            found -= {each.buffer for each in operation.destinations if each is not None}
    return frozenset(found)


def is_narrow_store(store: Store) -> bool:
    return store.mode == "set" and narrowed(store.value) is not None


def rewritten(operation: Operation, simpler: Callable[[Expr], Expr], narrow: frozenset[str]) -> Operation:
    if isinstance(operation, Reduce) and has_doubles(operation.values):
        return replace(operation, values=tuple(rewrite_nodes(value, simpler) for value in operation.values))
    if isinstance(operation, Compute) and has_doubles([store.value for store in operation.stores]):
        return replace(operation, stores=tuple(narrow_store(each, simpler, narrow) for each in operation.stores))
    return operation


def narrow_store(store: Store, simpler: Callable[[Expr], Expr], narrow: frozenset[str]) -> Store:
    value = rewrite_nodes(store.value, simpler)
    if store.buffer in narrow:
        value = narrowed(value) or cast(value, NARROW)
    return replace(store, value=value)


def has_doubles(values: Sequence[Expr]) -> bool:
    return any(item.dtype is WIDE for item in nodes_of(*values))


def folded(item: Expr) -> Expr:
    """A double that is known, and what a double is rounded to, where it need not have been one."""
    if isinstance(item, Op) and item.dtype is WIDE and item.name in FOLDED:
        known = [each for each in item.operands if isinstance(each, Const)]
        if len(known) == len(item.operands):
            given = [torch.tensor(each.value, dtype=WIDE) for each in known]
            return const(OPERATORS[item.name].meaning(*given).item(), WIDE)
    if not isinstance(item, Cast) or item.dtype is not NARROW:
        return item
    if (same := narrowed(item.arg)) is not None:
        return same
    wide = item.arg
    if isinstance(wide, Op) and wide.dtype is WIDE and wide.name in ROUNDED_ALIKE:
        operands = [narrowed(each) or narrowed_size(each) for each in wide.operands]
        if None not in operands:
            return op(wide.name, *(each for each in operands if each is not None))
    return item


def narrowed_size(item: Expr) -> Expr | None:
    """A double that is the same for all elements, as one of 32 bits."""
    return cast(item, NARROW) if not item.loads and all(isinstance(atom, Symbol) for atom in item.atoms) else None


def narrowed(item: Expr) -> Expr | None:
    """A double as a number of 32 bits, where it is one."""
    if isinstance(item, Cast) and item.dtype is WIDE and item.arg.dtype is NARROW:
        return item.arg
    if isinstance(item, Const) and item.dtype is WIDE:
        near = torch.tensor(item.value, dtype=WIDE).to(NARROW)
        return const(near.item(), NARROW) if near.double().item() == item.value else None
    return None
