"""What the rules about splits and concats are tried on, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Pick = Callable[[Any, Any], list[Any]]


def flat(value: Any) -> Any:
    """A reader that nobody can tell strides by."""
    return value.reshape(-1) * 2


def split_concat(
    pick: Pick, sizes: Sequence[int] = (1, 2, 1), dim: int = 1, to: int = 1, concat: Any = torch.cat, read: Any = flat
) -> Callable[..., Any]:
    return lambda x: read(concat(pick(torch.split(x, list(sizes), dim), x), to))


def unbind_concat(
    pick: Pick, dim: int = 1, to: int = 0, concat: Any = torch.stack, read: Any = flat
) -> Callable[..., Any]:
    return lambda x: read(concat(pick(torch.unbind(x, dim), x), to))


def all_three(p: Any, x: Any) -> list[Any]:
    return [p[0], p[1], p[2]]


def first_two(p: Any, x: Any) -> list[Any]:
    return [p[0], p[1]]


def backwards(p: Any, x: Any) -> list[Any]:
    return [p[2], p[1], p[0]]


def beside_foreign(p: Any, x: Any) -> list[Any]:
    return [x.sin(), p[0], p[1], p[2], x.cos()]


def four(p: Any, x: Any) -> list[Any]:
    return [p[0], p[1], p[2], p[3]]


def written_between(x: Any) -> Any:
    y = x * 2
    p = torch.split(y, [1, 2, 1], 1)
    y.add_(1)
    return torch.cat([p[0], p[1], p[2]], 1) * 2


def result_written(x: Any) -> Any:
    p = torch.split(x, [1, 2, 1], 1)
    joined = torch.cat([p[0], p[1], p[2]], 1)
    joined.add_(1)
    return joined * 2


def without_gradients_between(x: Any) -> Any:
    with torch.no_grad():
        p = torch.split(x, [1, 2, 1], 1)
        q = [p[0], p[1], p[2]]
    return torch.cat(q, 1) * x
