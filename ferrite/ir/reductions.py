"""The ways to combine many elements into one: what goes in, what comes out, and what it means in torch.

Every meaning takes the values, with the reduced axes flattened into the last dimension, and gives one tensor per
result. Results are then converted to the type of the buffer they go to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Reduction:
    """`empty`: whether nothing to combine has a result (the identity)."""

    name: str
    takes: int
    gives: int
    meaning: Callable[..., Results]
    empty: bool = False


def _extreme(largest: bool) -> Callable[[torch.Tensor], Results]:
    def meaning(value: torch.Tensor) -> Results:
        if 0 in value.shape[:-1]:
            return (value.new_empty(value.shape[:-1]),)  # no rows, so nothing is asked of an empty one
        return (torch.amax(value, -1) if largest else torch.amin(value, -1),)

    return meaning


def _extreme_at(largest: bool, last_nan: bool = False) -> Callable[[torch.Tensor], Results]:
    """The first place wins among equals, and a NaN wins over numbers; of several NaN the first, or the last."""

    def meaning(value: torch.Tensor) -> Results:
        if 0 in value.shape[:-1]:
            return value.new_empty(value.shape[:-1]), value.new_empty(value.shape[:-1], dtype=torch.int64)
        best = torch.amax(value, -1, keepdim=True) if largest else torch.amin(value, -1, keepdim=True)
        nans = torch.isnan(value) if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)
        hits = (value == best) | nans
        if last_nan:
            numbers = torch.arange(1, value.shape[-1] + 1, device=value.device)
            return best.squeeze(-1), torch.where(nans, numbers, hits.to(torch.int8)).argmax(-1)
        return best.squeeze(-1), hits.to(torch.int8).argmax(-1)

    return meaning


def _welford(value: torch.Tensor) -> Results:
    count = value.new_full(value.shape[:-1], value.shape[-1])
    if value.shape[-1] == 0:
        return torch.zeros_like(count), torch.zeros_like(count), count
    mean = value.mean(-1)
    return mean, ((value - mean.unsqueeze(-1)) ** 2).sum(-1), count


def _softmax(value: torch.Tensor) -> Results:
    if value.shape[-1] == 0 or 0 in value.shape[:-1]:
        return value.new_full(value.shape[:-1], -torch.inf), value.new_zeros(value.shape[:-1])
    most = torch.amax(value, -1)
    return most, torch.exp(value - most.unsqueeze(-1)).sum(-1)


def _xor(value: torch.Tensor) -> Results:
    total = torch.zeros_like(value[..., 0]) if value.shape[-1] else value.sum(-1).to(value.dtype)
    for place in range(value.shape[-1]):
        total = torch.bitwise_xor(total, value[..., place])
    return (total,)


REDUCTIONS = {
    row.name: row
    for row in (
        Reduction("sum", 1, 1, lambda value: (value.sum(-1, dtype=value.dtype),), empty=True),
        Reduction("prod", 1, 1, lambda value: (value.prod(-1, dtype=value.dtype),), empty=True),
        Reduction("amax", 1, 1, _extreme(True)),
        Reduction("amin", 1, 1, _extreme(False)),
        Reduction("any", 1, 1, lambda value: (value.any(-1),), empty=True),
        Reduction("all", 1, 1, lambda value: (value.all(-1),), empty=True),
        Reduction("xor", 1, 1, _xor, empty=True),
        Reduction("argmax", 1, 2, _extreme_at(True)),  # value, place
        Reduction("argmin", 1, 2, _extreme_at(False)),
        Reduction("argmax_of_window", 1, 2, _extreme_at(True, last_nan=True)),  # as pooling has it: of NaN the last
        Reduction("welford", 1, 3, _welford, empty=True),  # mean, sum of squared deviations, count
        Reduction("softmax", 1, 2, _softmax, empty=True),  # greatest, sum of exponentials relative to it
    )
}
