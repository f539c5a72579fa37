"""Constants of a graph: tensors that it reads from the module that owns it."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph.facts import attribute_of

aten = torch.ops.aten


def constant_of(item: Any) -> torch.Tensor | None:
    """The tensor behind a node that reads one, also through the copy that tracing puts behind `torch.tensor(...)`."""
    if not isinstance(item, torch.fx.Node):
        return None
    if item.target is aten.lift_fresh_copy.default:
        return constant_of(item.args[0])
    found = attribute_of(item) if item.op == "get_attr" else None
    return found if isinstance(found, torch.Tensor) and not torch_api.is_fake(found) else None
