"""Where users' own callables see the graph of torch calls."""

from __future__ import annotations

import torch

from ferrite.passes.pre_grad.canonical import CANONICAL
from ferrite.passes.pre_grad.metadata import add_values, values_to_examples
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.passes.shared.hooks import run_hooks
from ferrite.pipeline import PassContext


@pre_grad_pass
def pre_grad_custom_pass(gm: torch.fx.GraphModule, context: PassContext) -> int | None:
    """The callables of the option pre_grad_custom_pass, on torch functions with `example_value`s."""
    if not context.options.pre_grad_custom_pass:
        return 0
    as_torch(gm)
    values_to_examples(gm)
    run_hooks(context.options.pre_grad_custom_pass, gm, context)
    add_values(gm)
    for step in CANONICAL:
        step.function(gm, context)
    return None
