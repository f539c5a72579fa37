"""One form for every call: arguments by the names of the operator's schema, defaults filled in.

`split(x, 2)`, `split(x, 2, 0)` and `split(x, split_size=2, dim=0)` are one call. A rule is written in any spelling, and
an argument that it does not mention must hold its default, so that `add(a, b, alpha=2)` is never taken for `add(a, b)`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

MISSING = object()


class SchemaParameter(NamedTuple):
    """A parameter of an operator, as torch's schema has it: reading that takes many times as long. `default` is MISSING
    where there is none; `length`: of the list that one number stands for."""

    name: str
    type: str
    kwarg_only: bool
    default: Any
    length: int | None

    @property
    def has_default(self) -> bool:
        return self.default is not MISSING


@functools.lru_cache(maxsize=4096)
def parameters_of(operator: Any) -> tuple[SchemaParameter, ...]:
    """The parameters of an operator with a schema."""
    return tuple(
        SchemaParameter(
            item.name,
            str(item.type),
            item.kwarg_only,
            item.default_value if item.has_default_value() else MISSING,
            item.N,
        )
        for item in operator._schema.arguments
    )


def named_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name for an operator with a schema; by position for anything else.

    >>> sorted(named_arguments(torch.ops.aten.add.Tensor, (1, 2), {}).items())
    [('alpha', 1), ('other', 2), ('self', 1)]
    """
    if not hasattr(target, "_schema"):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for position, (name, _type, kwarg_only, default, _length) in enumerate(parameters_of(target)):
        if not kwarg_only and position < len(args):
            found[name] = args[position]
        elif name in kwargs:
            found[name] = kwargs[name]
        else:
            found[name] = list(default) if type(default) is list else default  # whoever gets it may change it
    return found


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    return named_arguments(node.target, node.args, node.kwargs)


def in_order(node: torch.fx.Node) -> tuple[Any, ...]:
    """The arguments of a call in the order of its schema, however it spells them."""
    return tuple(arguments_of(node).values())


def same_literal(left: Any, right: Any) -> bool:
    """Equal values of equal kind: 1 is not True and not 1.0, a list equals a tuple of the same items."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_literal, left, right))
    if type(left) is not type(right):
        return False
    return bool(left == right) or (isinstance(left, float) and left != left and right != right)
