"""Tensors and modules that a graph reads by name from the module that owns it."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import UserError, nearest
from ferrite.graph.model_lines import model_line

MAX_NAMES_SHOWN = 8  # names listed in a message


class MissingAttribute(UserError):
    """A dotted name leads nowhere."""


def attribute(module: torch.nn.Module, target: str, node: torch.fx.Node | None = None) -> Any:
    """What a dotted name such as `layers.0.weight` stands for: the very object, so that tied weights stay one.

    `node` is who asks, for the message.
    """
    found: Any = module
    for position, part in enumerate(target.split(".")):
        if not hasattr(found, part):
            raise missing(found, target, position, node)
        found = getattr(found, part)
    return found


def missing(holder: Any, target: str, position: int, node: torch.fx.Node | None) -> MissingAttribute:
    parts = target.split(".")
    walked, part = ".".join(parts[:position]), parts[position]
    names = names_in(holder)
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    line = model_line(node) if node is not None else None
    return MissingAttribute(
        f"the graph reads {target!r}, but {walked or 'the module'} has no {part!r}",
        {
            "did you mean": nearest(part, names),
            f"{walked or 'it'} has": ", ".join(names[:MAX_NAMES_SHOWN]) + more
            if names
            else f"nothing: {holder!r}"[:100],
            "in your model": str(line) if line is not None else None,
        },
    )


def names_in(holder: Any) -> list[str]:
    """The names under which a module holds modules, parameters and buffers; for other objects, their own fields."""
    if isinstance(holder, torch.nn.Module):
        return [*dict(holder.named_children()), *holder._parameters, *holder._buffers]
    return [name for name in getattr(holder, "__dict__", {}) if not name.startswith("_")]


def is_stored(module: torch.nn.Module, target: str) -> bool:
    """Whether a name stands for something that is kept: not for a value computed anew whenever it is asked for, as a
    parametrised weight is."""
    path, _, name = target.rpartition(".")
    holder = attribute(module, path) if path else module
    if not isinstance(holder, torch.nn.Module):
        return name in getattr(holder, "__dict__", {})
    return any(name in names for names in (holder._parameters, holder._buffers, holder._modules, holder.__dict__))
