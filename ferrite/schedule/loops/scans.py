"""Scans as states that are read while they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ferrite.ir import Expr, Local, Param, cast, choose, compare, either, index_value, op
from ferrite.ir.kernel import OWN, State
from ferrite.ir.program import Scan

# Sums of floats grow in the wider type, as they do in eager.
WIDER = {torch.float32: torch.float64}


def scan_state(
    operation: Scan, values: Sequence[Expr], names: Sequence[str], wider: Mapping[torch.dtype, torch.dtype] = WIDER
) -> tuple[State, tuple[Expr, ...], list[Expr]]:
    """The state, what is combined with it at a point, and what it holds then. `wider`: types in which sums grow."""
    kind, combine = operation.combine.name, operation.combine.results
    contribution = tuple(values)
    if combine:
        dtypes = tuple(value.dtype for value in values)
        return own(names, dtypes, combine, contribution)
    if kind in ("sum", "prod"):
        wide = wider.get(values[0].dtype, values[0].dtype)
        state = State(kind, (names[0],), (wide,))
        return state, (cast(values[0], wide),), [Local.intern(names[0], wide)]
    if kind == "sorted":
        return State("amin", (names[0],), (values[0].dtype,)), contribution, [Local.intern(names[0], values[0].dtype)]
    if kind in ("cummax", "cummin"):
        contribution = (values[0], index_value(operation.along))
        dtypes = tuple(value.dtype for value in contribution)
        return own(names, dtypes, latest_extreme(kind, dtypes), contribution)
    raise ValueError(f"no state for the scan {kind}")


def own(
    names: Sequence[str], dtypes: tuple[torch.dtype, ...], combine: tuple[Expr, ...], contribution: tuple[Expr, ...]
) -> tuple[State, tuple[Expr, ...], list[Expr]]:
    used = tuple(names[: len(dtypes)])
    locals_ = [Local.intern(name, dtype) for name, dtype in zip(used, dtypes, strict=True)]
    return State(OWN, used, dtypes, combine), contribution, list(locals_)


def latest_extreme(kind: str, dtypes: tuple[torch.dtype, ...]) -> tuple[Expr, ...]:
    """The better value and its place; of equals, and of several NaN, the latest."""
    value, place, other, there = (Param.intern(at, dtype) for at, dtype in enumerate(dtypes * 2))
    takes = compare("ge" if kind == "cummax" else "le", other, value)
    if dtypes[0].is_floating_point:
        takes = either(takes, op("isnan", other, dtype=torch.bool))
    return choose(takes, other, value), choose(takes, there, place)


def has_state(operation: Scan) -> bool:
    return bool(operation.combine.results) or operation.combine.name in ("sum", "prod", "cummax", "cummin", "sorted")
