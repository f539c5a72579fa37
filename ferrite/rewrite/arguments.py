"""One form for every call: arguments by the names of the operator's schema, defaults filled in.

`split(x, 2)`, `split(x, 2, 0)` and `split(x, split_size=2, dim=0)` are one call. A rule is written in any spelling, and
an argument that it does not mention must hold its default, so that `add(a, b, alpha=2)` is never taken for `add(a, b)`.
"""

from __future__ import annotations

from typing import Any

import torch

MISSING = object()


def named_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name for an operator with a schema; by position for anything else.

    >>> sorted(named_arguments(torch.ops.aten.add.Tensor, (1, 2), {}).items())
    [('alpha', 1), ('other', 2), ('self', 1)]
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for position, parameter in enumerate(schema.arguments):
        if not parameter.kwarg_only and position < len(args):
            found[parameter.name] = args[position]
        elif parameter.name in kwargs:
            found[parameter.name] = kwargs[parameter.name]
        elif parameter.has_default_value():
            found[parameter.name] = parameter.default_value
        else:
            found[parameter.name] = MISSING
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
