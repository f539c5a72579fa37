"""The law of attention, in programs (P17) and in kernels (K12)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ferrite.ir.expr import Expr, Param, indices_of, nodes_of
from ferrite.ir.index.algebra import Axis
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.program.loop_operations import Attention
from ferrite.ir.types import short

SUMMED_IN = (torch.float32, torch.float64)


def check_attention(operation: Attention, law: str = "P17") -> None:
    problem = next(problems(operation), None)
    if problem is not None:
        raise InvalidProgram(law, problem)


def problems(operation: Attention) -> Iterator[str]:
    one, around = operation, (*operation.axes, operation.group)
    if len(set(one.all_axes)) < len(one.all_axes):
        yield "attention has one axis twice"
    if len(one.destinations) != 3 or all(each is None for each in one.destinations):
        yield f"attention has three destinations, some of them wanted, not {one.destinations}"
    parts: list[tuple[str, Expr, tuple[Axis, ...], int]] = [
        ("query", one.query, (*around, one.rows, one.summed), 0),
        ("key", one.key, (*one.axes, one.keys, one.summed), 0),
        ("value", one.value, (*one.axes, one.keys, one.columns), 0),
        ("score", one.score, (*around, one.rows, one.keys), 1),
        ("what is allowed", one.allowed, (*around, one.rows, one.keys), 0),
    ]
    if (more := one.gradients) is not None:
        parts += [
            ("the gradient of the result", more.result, (*around, one.rows, one.columns), 0),
            ("the logarithm", more.logarithm, (*around, one.rows), 0),
            ("what is subtracted", more.subtracted, (*around, one.rows), 0),
            ("the gradient of the score", more.score, (*around, one.rows, one.keys), 2),
        ]
    for some, mine in ((one.key_blocks, one.rows), (one.row_blocks, one.keys)):
        for each in some:
            parts += [("a count of blocks", each.count, (*around, mine), 0)]
            parts += [("a place of a block", each.place, (*around, mine, each.entry), 0)]
            if not {each.count.dtype, each.place.dtype} <= {torch.int32, torch.int64}:
                yield "counts and places of blocks are integers"
    for name, value, axes, params in parts:
        yield from wrong_parts(name, value, axes, params, one.score.dtype)
    for number, destination in enumerate(one.destinations):
        for index in () if destination is None else destination.coordinates:
            if any(isinstance(atom, Axis) and atom not in one.result_axes(number) for atom in index.atoms):
                yield f"a result of attention is at {index}, which is another place for other sums"
    if one.score.dtype not in SUMMED_IN or (more is not None and more.score.dtype is not one.score.dtype):
        yield f"scores of {short(one.score.dtype)}: they are added up in 32 or 64 bits"
    if one.allowed.dtype is not torch.bool:
        yield "what is allowed is a bool"
    if one.lists and min(one.block_sides) < 1:
        yield f"blocks of {one.block_sides[0]} rows and {one.block_sides[1]} keys"
    wants_keys = more is not None and any(each is not None for each in one.destinations[1:])
    if wants_keys and one.key_blocks and not one.row_blocks:
        yield "gradients of keys and values without a list of rows"


def wrong_parts(name: str, value: Expr, axes: tuple[Axis, ...], params: int, dtype: torch.dtype) -> Iterator[str]:
    for item in nodes_of(value):
        if isinstance(item, Param) and (item.position >= params or item.dtype is not dtype):
            yield f"{name} of attention has a parameter {item.position} of {short(item.dtype)}"
        for index in indices_of(item):
            strange = [atom for atom in index.atoms if isinstance(atom, Axis) and atom not in axes]
            if strange:
                yield f"{name} of attention differs along {strange[0]}"
