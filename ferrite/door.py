"""The name that `torch.compile(..., backend="ferrite")` finds. The compiler itself is loaded with the first graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ferrite.collector import garbage_waits

if TYPE_CHECKING:
    import torch


def ferrite(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """`ferrite.backend.ferrite`, with the collector off from its import on."""
    with garbage_waits():
        from ferrite.backend import ferrite as compiler

        return compiler(gm, example_inputs, **settings)
