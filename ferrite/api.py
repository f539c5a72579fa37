"""What a user calls: `torch.compile(..., backend="ferrite")`, `ferrite.compile`, `ferrite.freeze`.

The compiler itself, `ferrite.backend`, is loaded with the first graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ferrite.collector import garbage_waits

if TYPE_CHECKING:
    import torch


def ferrite(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """The backend that torch finds by its name; the collector is off from the import of the compiler on."""
    with garbage_waits():
        from ferrite.backend import ferrite as compiler
        from ferrite.reports import written_at_exit

        return compiler(gm, example_inputs, **settings, asked_for_report=written_at_exit)


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Compile a module or function: `torch.compile(model, backend="ferrite")` with options as keywords.

    Options are checked at once, so that a misspelt one is reported here and not at the first call. Without a model it
    is a decorator: `@ferrite.compile(strict=True)`.
    """
    import torch

    from ferrite.options import resolve
    from ferrite.passes import checked_options

    if model is None:
        return functools.partial(compile, mode=mode, fullgraph=fullgraph, dynamic=dynamic, **options)
    checked_options(resolve(options, mode))
    settings = options if mode is None else {"mode": mode, **options}
    return torch.compile(model, backend=ferrite, fullgraph=fullgraph, dynamic=dynamic, options=settings)


def freeze(
    model: Callable[..., Any],
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A function that does what the model does in inference, with its parameters as constants: see docs/freezing.md.

    It runs without gradients. The model itself stays as it is, unless `freeze_discard_parameters=True` says otherwise.
    """
    import torch

    from ferrite.errors import UserError

    modules = list(model.named_modules()) if isinstance(model, torch.nn.Module) else []
    training = [name or "the module itself" for name, each in modules if each.training]
    if training:
        raise UserError(
            "a model in training mode cannot be frozen",
            {"in training mode": ", ".join(training[:3]), "to change that": "model.eval()"},
        )
    compiled = compile(model, mode=mode, fullgraph=fullgraph, dynamic=dynamic, **{**options, "freeze": True})

    @functools.wraps(model, updated=())
    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return compiled(*args, **kwargs)

    return frozen
