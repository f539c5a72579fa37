"""Inclusive prefixes: what a scan means, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrite.ir.expr_interpret import Points
from ferrite.ir.program.loop_operations import Combine

Results = tuple[torch.Tensor, ...]


def _extreme(scan: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[torch.Tensor, int], Results]:
    return lambda value, along: tuple(scan(value, along))


# name: (how many values go in, how many come out, meaning)
SCANS: dict[str, tuple[int, int, Callable[..., Results]]] = {
    "sum": (1, 1, lambda value, along: (value.cumsum(along, dtype=value.dtype),)),
    "prod": (1, 1, lambda value, along: (value.cumprod(along, dtype=value.dtype),)),
    "logsumexp": (1, 1, lambda value, along: (value.logcumsumexp(along),)),
    "cummax": (1, 2, _extreme(torch.cummax)),  # value, place of the last that is as large
    "cummin": (1, 2, _extreme(torch.cummin)),
    # no prefixes, but as much depends on as much: the least first
    "sorted": (1, 1, lambda value, along: (value.sort(along).values,)),
}


def scan_values(combine: Combine, values: Sequence[torch.Tensor], along: int) -> Results:
    if not combine.results:
        return SCANS[combine.name][2](*values, along)
    state = [value.select(along, 0) for value in values] if values[0].size(along) else []
    states = [state] if state else []
    for place in range(1, values[0].size(along)):
        new = [value.select(along, place) for value in values]
        points = Points((), {}, _no_buffer, values[0].device, params=[*state, *new])
        state = [points(result) for result in combine.results]
        states.append(state)
    if not states:
        return tuple(values)
    return tuple(torch.stack(column, along) for column in zip(*states, strict=True))


def _no_buffer(name: str) -> torch.Tensor:
    raise ValueError(f"a combine function reads no memory, but asks for {name}")
