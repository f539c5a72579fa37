"""The name that `torch.compile(..., backend="ferrite")` finds. The compiler itself is loaded with the first graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ferrite.collector import garbage_waits

if TYPE_CHECKING:
    import torch


def ferrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: a graph of torch calls in, a function of the same arguments out."""
    with garbage_waits():
        from ferrite.backend import ferrite as compiler

        return compiler(gm, example_inputs, mode=mode, options=options)
