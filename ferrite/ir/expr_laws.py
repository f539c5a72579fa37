"""Whether the types in a scalar expression fit: operands to the table of operators, results to operands.

Arithmetic on 16-bit and smaller floats is written as arithmetic on wider ones: a narrow float is loaded, stored,
converted, chosen (`where`, `masked`) or reinterpreted (`bitcast`), and nothing else.
"""

from __future__ import annotations

import torch

from ferrite.ir.expr import Cast, Const, Data, Expr, IndexValue, Load, Local, Masked, Op, Param, Random, indices_of
from ferrite.ir.expr_interpret import ERRORS
from ferrite.ir.index.algebra import Index
from ferrite.ir.random import KINDS as RANDOM_KINDS
from ferrite.ir.scalar import OPERATORS, TAKES
from ferrite.ir.types import NARROW, is_integer, short

WITH_NARROW = frozenset(["where", "bitcast"])
DECIDING = {"ldexp": 0, "polygamma": 1}  # the operand that decides the type; the other may be an integer


def is_narrow(dtype: torch.dtype) -> bool:
    return dtype in NARROW or (dtype.is_floating_point and dtype.itemsize == 1)


def wrong_type(item: Expr) -> str | None:
    """What is wrong with the types of one node; None where nothing is."""
    for index in indices_of(item):
        problem = wrong_data(index)
        if problem:
            return problem
    match item:
        case Op():
            return _wrong_operator(item)
        case Masked():
            if item.mask.dtype != torch.bool:
                return f"masked takes a bool first, not {short(item.mask.dtype)}"
            return _differ("masked", item.value, item.other) or _result(item, item.value.dtype)
        case Random():
            if item.kind not in RANDOM_KINDS:
                return f"no random numbers of kind {item.kind!r}"
            return None if item.seed.dtype == torch.int64 else f"a seed is i64, not {short(item.seed.dtype)}"
        case IndexValue():
            return (
                "an index is no bool and no complex number"
                if item.dtype == torch.bool or item.dtype.is_complex
                else None
            )
        case Const():
            return None if 0 <= item.bits < 1 << (8 * item.dtype.itemsize) else f"{item.bits:#x} has too many bits"
        case Param():
            return None if item.position >= 0 else f"parameter {item.position}"
        case Cast() | Load() | Local():
            return None
    return f"{type(item).__name__} is no scalar expression"


def wrong_data(index: Index) -> str | None:
    """An index that is read from memory is an integer, and the error it may raise is one that eager does."""
    for atom in index.atoms:
        if not isinstance(atom, Data):
            continue
        if not is_integer(atom.value.dtype) or atom.value.dtype == torch.bool:
            return f"an index is an integer, not {short(atom.value.dtype)}"
        if atom.complaint.partition(": ")[0] not in ERRORS:
            return f"an index outside its bounds raises {atom.complaint!r}"
    return None


def _wrong_operator(item: Op) -> str | None:
    row = OPERATORS.get(item.name)
    if row is None:
        return f"no operator {item.name!r}"
    if len(item.operands) != row.arity:
        return f"{item.name} takes {row.arity} operands, not {len(item.operands)}"
    operands = item.operands
    if item.name == "where":
        if operands[0].dtype != torch.bool:
            return f"where takes a bool first, not {short(operands[0].dtype)}"
        operands = operands[1:]
    if item.name in DECIDING:
        deciding = operands[DECIDING[item.name]]
        operands = tuple(operand for operand in operands if operand is deciding or not is_integer(operand.dtype))
    kind = operands[0].dtype
    problem = _differ(item.name, *operands) or _not_taken(item.name, row.takes, kind)
    if problem:
        return problem
    if item.name == "bitcast" and item.dtype.itemsize != kind.itemsize:
        return f"bitcast from {short(kind)} to {short(item.dtype)} changes the size"
    if item.name == "pack_bytes":
        return _result(item, torch.int32)
    expected = {"same": kind, "bool": torch.bool}
    return _result(item, expected[row.gives]) if row.gives in expected else None


def _not_taken(name: str, takes: str, dtype: torch.dtype) -> str | None:
    if is_narrow(dtype) and name not in WITH_NARROW:
        return f"{name} on {short(dtype)}: arithmetic on narrow floats is done in a wider type"
    return None if TAKES[takes](dtype) else f"{name} takes {takes}, not {short(dtype)}"


def _differ(name: str, *operands: Expr) -> str | None:
    types = dict.fromkeys(short(operand.dtype) for operand in operands)
    return None if len(types) <= 1 else f"{name} takes operands of one type, not {' and '.join(types)}"


def _result(item: Expr, dtype: torch.dtype) -> str | None:
    word = item.name if isinstance(item, Op) else type(item).__name__.lower()
    return None if item.dtype == dtype else f"{word} gives {short(dtype)}, not {short(item.dtype)}"
