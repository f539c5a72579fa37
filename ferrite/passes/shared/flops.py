"""What torch's own counter says of a call: multiplications and additions of products, convolutions and attention."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value


def flops_of_call(node: torch.fx.Node) -> int | None:
    """At the sizes seen, where they are not known; None of a call that is not counted."""
    from torch.utils.flop_counter import flop_registry

    formula: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fake_value)
    try:
        return torch_api.size_hint(formula(*args, **kwargs, out_val=fake_value(node)))
    except Exception:  # a formula of torch's or of a library's that does not know this spelling: a figure is missing
        return None
